package bench

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Table shows rows for people, each as soon as it is there.
type Table struct {
	w    io.Writer
	name int // width
}

// NewTable returns a table that is written to w.
func NewTable(w io.Writer) *Table { return &Table{w: w} }

// Begin writes the head. It is for [Options].
func (t *Table) Begin(about string, names []string) {
	for _, n := range names {
		t.name = max(t.name, utf8.RuneCountInString(n))
	}
	fmt.Fprintf(t.w, "%s\nFloor and work take turns; medians. A ratio of 1 is as fast as the floor. unread: the consumer did not look at the bytes; read: at every cache line.\n\n", about)
	t.line("", "VALUE", "UNIT", "RATIO", "FLOOR", "THE FLOOR IS")
}

// Each writes a row. It is for [Options].
func (t *Table) Each(r Row) {
	ratio, floor, name := "-", "-", "-"
	if r.Floor != nil && r.Ratio != nil {
		ratio, floor, name = strconv.FormatFloat(*r.Ratio, 'f', 2, 64), decimal(*r.Floor), r.FloorName
	}
	t.line(r.Name, decimal(r.Value), r.Unit, ratio, floor, name)
}

func (t *Table) line(name, value, unit, ratio, floor, floorName string) {
	pad := strings.Repeat(" ", max(t.name-utf8.RuneCountInString(name), 0))
	fmt.Fprintf(t.w, "%s%s  %10s %-12s  %5s  %10s  %s\n", name, pad, value, unit, ratio, floor, floorName)
}

// decimal shows a number with three digits that count, or all of them before the point, with commas.
func decimal(f float64) string {
	if f < 1000 {
		digits := 0
		if f > 0 {
			digits = max(2-int(math.Floor(math.Log10(f))), 0)
		}
		return strconv.FormatFloat(f, 'f', digits, 64)
	}
	s := strconv.FormatFloat(f, 'f', 0, 64)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
