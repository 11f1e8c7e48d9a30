package gauge

import "testing"

func TestBarShowsLevelAndMarks(t *testing.T) {
	t.Parallel()
	g := Gauge{Low: 25, High: 75, Cap: 100, Unit: Size}
	for level, want := range map[int64]string{
		0:   "▕     │         │    ▏",
		50:  "▕█████┃████     │    ▏",
		75:  "▕█████┃█████████│    ▏",
		100: "▕█████┃█████████┃████▏",
		150: "▕█████┃█████████┃████▏",
		-1:  "▕     │         │    ▏",
	} {
		g.Level = level
		if got := g.Bar(20); got != want {
			t.Errorf("%d:\n got %s\nwant %s", level, got, want)
		}
	}
}

func TestMarksStandUnderTheirPlaces(t *testing.T) {
	t.Parallel()
	g := Gauge{Low: 25, High: 75, Cap: 100, Unit: Size}
	for width, want := range map[int]string{40: "           low 25 B            high 75 B", 4: "  low 25 B  high 75 B", -3: " low 25 B  high 75 B"} {
		if got := g.Marks(width); got != want {
			t.Errorf("%d:\n got %q\nwant %q", width, got, want)
		}
	}
	if got := (Gauge{Unit: Size}).Bar(0); got != "▕┃▏" && got != "▕│▏" {
		t.Errorf("no cap: %s", got)
	}
}

func TestSizesForPeople(t *testing.T) {
	t.Parallel()
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 16 << 20: "16.0 MiB", 5 << 40: "5.0 TiB", 5 << 50: "5120.0 TiB"} {
		if got := Size(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}
