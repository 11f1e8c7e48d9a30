// Package bench measures the planes of Sluice against the floors of the machine: what the same bytes, wakings or products cost without Sluice. `sluice bench` is
// its command line.
package bench

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"runtime"
	"slices"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/plan"
)

// Options say what to measure.
type Options struct {
	Sample int64  // bytes of a sample, 64 KiB to 1 GiB
	Dir    string // where dirstore is measured, in a folder of its own: a directory that is there, normally on tmpfs
	Disk   string // likewise on a disk; not measured if empty
	Only   string // regular expression: rows whose names match it; all if empty
	Quick  bool   // few rounds of small work: for trying out the command, not for figures

	// Begin is told before the first row what is measured, with the names of the rows to come. Each is told of every row when it is there.
	Begin func(about string, names []string)
	Each  func(Row)
}

// Result is the object that --json prints.
type Result struct {
	Rows []Row `json:"rows"`
}

// Row is one measurement. Floor and Ratio are null, and FloorName is empty, where there is no floor.
type Row struct {
	Name      string   `json:"name"`
	Value     float64  `json:"value"`
	Unit      string   `json:"unit"`
	FloorName string   `json:"floor_name"`
	Floor     *float64 `json:"floor"` // in the same unit
	Ratio     *float64 `json:"ratio"` // 1 is as fast as the floor, less is slower, whether the unit is a speed or a time
}

// job makes a row. run gives value and floor in the job's unit; a floor of 0 is none.
type job struct {
	name, unit, floor string
	time              bool // the unit is a time: less is better
	run               func(ctx context.Context) (value, floor float64, err error)
	in, also          *place // where its files lie; nil if it has none
}

// bench is one run.
type bench struct {
	o      Options
	tokens int64 // of a sample
	sample int64 // its bytes
}

const (
	leastSample = 64 << 10 // dirstore recycles nothing smaller
	mostSample  = 1 << 30  // one pwritev writes no more than 2 GiB
)

func invalid(flag, detail string) error {
	return &sluice.Error{Kind: sluice.Invalid, Op: "bench", Subject: flag, Detail: detail}
}

// Run measures. When it returns, everything that it has put anywhere is gone, also if ctx ended.
func Run(ctx context.Context, o Options) (_ *Result, err error) {
	if o.Sample < leastSample || o.Sample > mostSample {
		return nil, invalid("--sample", fmt.Sprintf("is %d, want %d (64KiB) to %d (1GiB)", o.Sample, leastSample, mostSample))
	}
	only, err := regexp.Compile(o.Only)
	if err != nil {
		return nil, &sluice.Error{Kind: sluice.Invalid, Op: "bench", Subject: "--only", Detail: "is no regular expression", Err: err}
	}
	b := &bench{o: o, tokens: o.Sample / bytesPerToken}
	b.sample = b.tokens * bytesPerToken

	places := []*place{newPlace("--dir", o.Dir, false)}
	if o.Disk != "" {
		places = append(places, newPlace("--disk", o.Disk, true))
	}
	jobs := b.memJobs()
	for _, p := range places {
		jobs = append(jobs, b.dirJobs(p)...)
	}
	jobs = append(jobs, b.queueJobs()...)
	jobs = append(jobs, b.healthJobs(places[0])...)
	jobs = append(jobs, b.serviceJobs(places[0])...)
	jobs = append(jobs, b.controlJobs(places)...)
	jobs = append(jobs, b.modelJobs()...)
	jobs = slices.DeleteFunc(jobs, func(j job) bool { return !only.MatchString(j.name) })
	if len(jobs) == 0 {
		return nil, invalid("--only", fmt.Sprintf("is %q, which no row's name matches; without it all rows are shown", o.Only))
	}

	about := fmt.Sprintf("samples of %.4g MB (eagle3, %d tokens); %s %s/%s, %d cores", float64(b.sample)/1e6, b.tokens, runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.NumCPU())
	var names []string
	for _, j := range jobs {
		names = append(names, j.name)
	}
	for _, p := range places {
		if !slices.ContainsFunc(jobs, func(j job) bool { return j.in == p || j.also == p }) {
			continue
		}
		if err := p.open(5 * b.sample); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, p.remove()) }()
		about += fmt.Sprintf("; %s %s", p.flag, p.where)
	}
	if o.Begin != nil {
		o.Begin(about, names)
	}

	r := &Result{}
	for _, j := range jobs {
		runtime.GC() // what the row before has left is not this one's
		value, floor, err := j.run(ctx)
		switch {
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		case err != nil:
			return nil, fmt.Errorf("bench: %s: %w", j.name, err)
		}
		row := Row{Name: j.name, Value: value, Unit: j.unit}
		if j.floor != "" {
			ratio := value / floor
			if j.time {
				ratio = floor / value
			}
			row.FloorName, row.Floor, row.Ratio = j.floor, &floor, &ratio
		}
		r.Rows = append(r.Rows, row)
		if o.Each != nil {
			o.Each(row)
		}
	}
	return r, nil
}

// turn is one turn of floor or work: the time that counts.
type turn func(ctx context.Context) (time.Duration, error)

// turns lets floor and work take turns, so that a machine that others use too slows down both, and returns the medians in seconds. The first round does not
// count. The time for all is bounded.
func (b *bench) turns(ctx context.Context, rounds int, floor, work turn) (floorS, workS float64, err error) {
	budget, least := 3*time.Second, 5
	if b.o.Quick {
		budget, least, rounds = 200*time.Millisecond, 1, 3
	}
	var took [2][]time.Duration
	var begun time.Time
	for i := range rounds + 1 {
		if i == 1 {
			begun = time.Now()
		}
		for side, f := range [2]turn{floor, work} {
			if err := ctx.Err(); err != nil {
				return 0, 0, err
			}
			d, err := f(ctx)
			if err != nil {
				return 0, 0, err
			}
			if i > 0 {
				took[side] = append(took[side], max(d, 1))
			}
		}
		if i >= least && time.Since(begun) > budget {
			break
		}
	}
	return median(took[0]).Seconds(), median(took[1]).Seconds(), nil
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2]
}

// timed is a turn whose whole time counts.
func timed(f func(ctx context.Context) error) turn {
	return func(ctx context.Context) (time.Duration, error) {
		begun := time.Now()
		err := f(ctx)
		return time.Since(begun), err
	}
}

// typeOf names the file system of a directory, or is empty if it cannot be looked at.
func typeOf(dir string) string {
	if d, err := plan.Look(dir); err == nil {
		return d.Type
	}
	return ""
}
