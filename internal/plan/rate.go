package plan

import (
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Floors are what one core was measured to copy at most, in GiB/s, on a 2-core development machine (docs/plan.md); others differ by a third and more.
const (
	putFloor  = 2.7 // write of a sample to a fresh tmpfs file, in one call
	readFloor = 7.0 // read of every cache line of a fresh mapping
	wireFloor = 1.3 // HTTP PUT over one connection into a tmpfs file, a core at each end
)

// Rate is what the target's speed makes of the sizes.
type Rate struct {
	TokensPerS  int64   `json:"tokens_per_s"` // of all nodes together
	Nodes       int64   `json:"nodes"`
	SamplesPerS float64 `json:"samples_per_s"`
	WindowsPerS float64 `json:"windows_per_s"`
	BytesPerS   int64   `json:"bytes_per_s"`
	GBPerSIn    float64 `json:"gb_per_s_in"`       // into the store
	GBPerSOut   float64 `json:"gb_per_s_out"`      // out of it: the same, since a sample goes to one rank
	GBPerSNode  float64 `json:"gb_per_s_per_node"` // out of each node of the target

	PutCores  float64 `json:"put_cores"`  // writing into a store on tmpfs, without a network
	ReadCores float64 `json:"read_cores"` // the trainers' reading
	SendCores float64 `json:"send_cores"` // sending over a network, all nodes together
	TakeCores float64 `json:"take_cores"` // taking that in and writing it into the store

	SecondsToHigh float64 `json:"seconds_to_high_mark"` // from empty, if trainers stall: producers pause there
	SecondsToFull float64 `json:"seconds_to_full"`      // likewise, to MaxBytes
	EpochSeconds  float64 `json:"epoch_seconds"`        // 0 without prompts
}

// Link is what a node's link makes of them.
type Link struct {
	BytesPerS     int64   `json:"bytes_per_s"`
	MaxTokensPerS int64   `json:"max_tokens_per_s"` // that one link takes in
	PercentIn     float64 `json:"percent_in"`       // of the store's link, each way; 0 without a rate, like the next
	PercentNode   float64 `json:"percent_per_node"` // of each node's link
}

func (p *Plan) rate(in *Input) error {
	var m meter
	if in.Link > 0 {
		p.Link = &Link{BytesPerS: in.Link, MaxTokensPerS: int64(min(float64(in.Link)/float64(p.MeanSampleBytes)*float64(p.MeanTokens), most))}
	}
	if in.TokensPerS == 0 {
		return nil
	}
	r := &Rate{TokensPerS: in.TokensPerS, Nodes: in.Nodes}
	r.BytesPerS = m.times("bytes_per_s", in.TokensPerS, p.MeanSampleBytes) / p.MeanTokens
	if m.err != nil {
		return m.err
	}
	bytes := float64(r.BytesPerS)
	const gib = 1 << 30
	r.SamplesPerS = float64(in.TokensPerS) / float64(p.MeanTokens)
	r.WindowsPerS = round(r.SamplesPerS / float64(p.WindowSamples))
	r.GBPerSIn, r.GBPerSOut, r.GBPerSNode = round(bytes/1e9), round(bytes/1e9), round(bytes/1e9/float64(in.Nodes))
	r.PutCores, r.ReadCores = round(bytes/gib/putFloor), round(bytes/gib/readFloor)
	r.SendCores, r.TakeCores = round(bytes/gib/wireFloor), round(bytes/gib/wireFloor)
	if r.BytesPerS > 0 {
		r.SecondsToHigh, r.SecondsToFull = round(float64(p.Run.Caps.HighWatermarkBytes)/bytes), round(float64(p.Run.Caps.MaxBytes)/bytes)
	}
	r.EpochSeconds = round(float64(p.EpochSamples) / r.SamplesPerS)
	r.SamplesPerS = round(r.SamplesPerS)
	if p.Link != nil {
		p.Link.PercentIn = round(100 * bytes / float64(in.Link))
		p.Link.PercentNode = round(100 * bytes / float64(in.Link) / float64(in.Nodes))
	}
	p.Rate = r
	return nil
}

// round keeps four decimals: more would claim what nobody knows.
func round(f float64) float64 { return math.Round(f*1e4) / 1e4 }

var linkUnits = map[string]float64{
	"Mbit": 1e6 / 8, "Gbit": 1e9 / 8, "Tbit": 1e12 / 8, "Mbps": 1e6 / 8, "Gbps": 1e9 / 8, "Tbps": 1e12 / 8,
	"MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 1 << 20, "GiB": 1 << 30,
}

var linkForm = regexp.MustCompile(`^([0-9]{1,9}(?:\.[0-9]{1,6})?) ?([A-Za-z]+)(/s)?$`)

// ParseLink reads the speed of a link, such as 100Gbit or 25GB/s, and returns bytes a second. Bits and bytes are told apart by the unit's full name, so a lone b is refused.
func ParseLink(s string) (int64, error) {
	m := linkForm.FindStringSubmatch(s)
	if m != nil {
		n, err := strconv.ParseFloat(m[1], 64)
		if unit := linkUnits[m[2]]; err == nil && unit > 0 && n*unit >= 1 && n*unit <= most && (m[3] == "" || !strings.HasSuffix(m[2], "bps")) {
			return int64(math.Round(n * unit)), nil
		}
	}
	units := make([]string, 0, len(linkUnits))
	for u := range linkUnits {
		units = append(units, u)
	}
	slices.Sort(units)
	return 0, invalid("--link", "is %q, want a number and one of %s, such as 100Gbit or 25GB/s", s, strings.Join(units, ", "))
}
