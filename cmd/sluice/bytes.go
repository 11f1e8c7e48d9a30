package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// byteSize is a flag that takes bytes for people: 1048576, 16MiB, 2.5GB.
type byteSize int64

// byteUnits are in the order in which a size is shown: the largest that divides it.
var byteUnits = []struct {
	name string
	size float64
}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"TB", 1e12}, {"GB", 1e9}, {"MB", 1e6}, {"KB", 1e3}, {"B", 1}, {"", 1}}

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

// String is the shortest exact form that [byteSize.Set] takes.
func (b *byteSize) String() string {
	n := int64(*b)
	for _, u := range byteUnits {
		if size := int64(u.size); n != 0 && size > 1 && n%size == 0 {
			return strconv.FormatInt(n/size, 10) + u.name
		}
	}
	return strconv.FormatInt(n, 10)
}

func (b *byteSize) Type() string { return "size" }

// byteCap is a flag that takes a [byteSize], or none for no cap.
type byteCap struct {
	byteSize
	none bool
}

func (c *byteCap) Set(s string) error {
	if c.none = s == "none"; c.none {
		return nil
	}
	return c.byteSize.Set(s)
}

func (c *byteCap) String() string {
	if c.none {
		return "none"
	}
	return c.byteSize.String()
}
