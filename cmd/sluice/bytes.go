package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// byteSize is a flag that takes bytes for people: 1048576, 16MiB, 2.5GB.
type byteSize int64

var byteUnits = []struct {
	name string
	size float64
}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"B", 1}, {"", 1}}

func (b *byteSize) Set(s string) error {
	for _, u := range byteUnits {
		number, ok := strings.CutSuffix(s, u.name)
		if !ok {
			continue
		}
		n, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
		n *= u.size
		if err != nil || n < 0 || n >= 1<<53 || n != math.Trunc(n) {
			break
		}
		*b = byteSize(n)
		return nil
	}
	return fmt.Errorf("want whole bytes of 0 or more, as 1048576, 16MiB or 2.5GB")
}

func (b *byteSize) String() string { return strconv.FormatInt(int64(*b), 10) }

func (b *byteSize) Type() string { return "size" }
