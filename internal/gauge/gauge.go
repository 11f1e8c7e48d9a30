// Package gauge draws how full something is for a terminal: the level as a bar, with the two marks between which a gate paces its producers.
package gauge

import (
	"fmt"
	"strings"
)

// Gauge is a level under a cap.
type Gauge struct {
	Level, Low, High, Cap int64
	Unit                  func(int64) string // a number for people; [Size] for bytes
}

// Bar draws the level in width cells, beside the two of the frame.
func (g Gauge) Bar(width int) string {
	width = max(width, 1)
	cells := []rune(strings.Repeat(" ", width))
	for i := range g.cell(g.Level, width) {
		cells[i] = '█'
	}
	for _, mark := range []int64{g.Low, g.High} {
		if i := min(g.cell(mark, width), width-1); cells[i] == ' ' {
			cells[i] = '│'
		} else {
			cells[i] = '┃'
		}
	}
	return "▕" + string(cells) + "▏"
}

// Marks names the two marks, each under its place in a [Gauge.Bar] of the same width.
func (g Gauge) Marks(width int) string {
	width = max(width, 1)
	low, high := "low "+g.Unit(g.Low), "high "+g.Unit(g.High)
	line := strings.Repeat(" ", 1+g.cell(g.Low, width)) + low
	if gap := 1 + g.cell(g.High, width) - len(line); gap > 0 {
		return line + strings.Repeat(" ", gap) + high
	}
	return line + "  " + high
}

func (g Gauge) cell(n int64, width int) int {
	if g.Cap <= 0 || n <= 0 {
		return 0
	}
	return int(min(float64(n)/float64(g.Cap), 1) * float64(width))
}

// Size shows bytes for people: 12.0 MiB.
func Size(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	v, i := float64(n), 0
	for v >= 1024 && i < len(units)-1 {
		v /= 1024
		i++
	}
	if i == 0 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", v, units[i])
}
