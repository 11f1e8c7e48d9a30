package wire

import (
	"encoding/json"
	"errors"
	"time"

	"github.com/sluice-ml/sluice"
)

// RunSpec is what a run is created with: POST /v1/runs. What is left out has its default. Creating a run again with the same spec is success.
type RunSpec struct {
	RunID string `json:"run_id" doc:"Name of the run, unique in the service." maxLength:"200" example:"r1"`

	Algorithm string          `json:"algorithm,omitempty" doc:"One of the built-in schemas: eagle3, dflash, dspark. Give this, schema or mixed." example:"eagle3"`
	Schema    json.RawMessage `json:"schema,omitempty" doc:"A schema document of your own. Give this, algorithm or mixed."`
	Mixed     bool            `json:"mixed,omitempty" doc:"The run takes refs of any run_id, algorithm, schema_version and features, and checks them against no schema."`

	Caps Caps `json:"caps" doc:"Hard caps and marks; at least one cap is needed."`

	VisibilityTimeoutSeconds Seconds `json:"visibility_timeout_seconds,omitempty" doc:"How long a lease lives unless it is renewed; 30."`
	MaxFails                 int     `json:"max_fails,omitempty" doc:"Fails that make a dead letter; 5."`
	MaxExpiries              int     `json:"max_expiries,omitempty" doc:"Expiries that make a dead letter; 20."`
	Producers                int     `json:"producers,omitempty" doc:"Producer sessions that the run waits for before it ends; 1."`
	ProducerTimeoutSeconds   Seconds `json:"producer_timeout_seconds,omitempty" doc:"Silence after which a named producer counts as lost; 60."`

	Windows            *Windows `json:"windows,omitempty" doc:"Deals the stream out to data-parallel ranks in equal shares."`
	LargestSample      int64    `json:"largest_sample,omitempty" doc:"Most bytes that a sample can have; needed with windows or checkpoints."`
	StepsPerCheckpoint int      `json:"steps_per_checkpoint,omitempty" doc:"Consumers ack at checkpoints, so many steps apart."`
	SamplesPerStep     int      `json:"samples_per_step,omitempty" doc:"Samples that all consumers take in a step; needed with steps_per_checkpoint where there are no windows."`

	TargetVersions  []string `json:"target_versions,omitempty" doc:"Values of target_model_version that are let in; any if empty."`
	MinDraftVersion string   `json:"min_draft_version,omitempty" doc:"Lowest draft_weight_version that is let in; any if empty."`
}

// Caps are [sluice.Caps]; what is left out is unset.
type Caps struct {
	MaxBytes             int64 `json:"max_bytes,omitempty" doc:"Hard cap in bytes." example:"8589934592"`
	MaxSamples           int64 `json:"max_samples,omitempty" doc:"Hard cap in samples."`
	HighWatermarkBytes   int64 `json:"high_watermark_bytes,omitempty" doc:"Producers pause here; 75 % of max_bytes."`
	LowWatermarkBytes    int64 `json:"low_watermark_bytes,omitempty" doc:"And go on here; 25 %."`
	HighWatermarkSamples int64 `json:"high_watermark_samples,omitempty" doc:"The same for samples; 75 % of max_samples."`
	LowWatermarkSamples  int64 `json:"low_watermark_samples,omitempty" doc:"25 %."`
}

// Windows are [sluice.Windows].
type Windows struct {
	Ranks    int  `json:"ranks" doc:"Data-parallel ranks."`
	PerRank  int  `json:"per_rank" doc:"Samples a rank and step."`
	Prefetch int  `json:"prefetch,omitempty" doc:"Windows opened ahead."`
	DropTail bool `json:"drop_tail,omitempty" doc:"Drop an incomplete last window instead of padding it."`
}

// Config is the run as the domain has it, not yet resolved.
func (s *RunSpec) Config() (sluice.RunConfig, error) {
	c := sluice.RunConfig{
		RunID: s.RunID, Mixed: s.Mixed, Caps: sluice.Caps(s.Caps), VisibilityTimeout: s.VisibilityTimeoutSeconds.Duration(), MaxFails: s.MaxFails, MaxExpiries: s.MaxExpiries,
		Producers: s.Producers, ProducerTimeout: s.ProducerTimeoutSeconds.Duration(), LargestSample: s.LargestSample, StepsPerCheckpoint: s.StepsPerCheckpoint,
		SamplesPerStep: s.SamplesPerStep, TargetVersions: s.TargetVersions, MinDraftVersion: s.MinDraftVersion,
	}
	if s.Windows != nil {
		w := sluice.Windows(*s.Windows)
		c.Windows = &w
	}
	if s.Mixed {
		if s.Algorithm != "" || len(s.Schema) != 0 {
			return c, &sluice.Error{Kind: sluice.Invalid, Op: "run", Subject: s.RunID, Detail: "is mixed and has algorithm or schema too, want one of them"}
		}
		return c, nil
	}
	var err error
	if c.Schema, err = schemaOf(s.Algorithm, s.Schema); err != nil && sluice.KindOf(err) == "" {
		err = &sluice.Error{Kind: sluice.Invalid, Op: "run", Subject: s.RunID, Err: err}
	}
	return c, err
}

// schemaOf is the schema that one of two fields gives.
func schemaOf(algorithm string, document json.RawMessage) (*sluice.Schema, error) {
	switch {
	case algorithm != "" && len(document) != 0:
		return nil, errors.New("has both algorithm and schema, want one of them")
	case algorithm != "":
		return sluice.SchemaOf(sluice.Algorithm(algorithm))
	case len(document) != 0:
		return sluice.ParseSchema(document)
	}
	return nil, errors.New("has neither algorithm nor schema, want one of them")
}

// SpecOf is a run on the wire. Its schema is given as a document, whatever it came from.
func SpecOf(c *sluice.RunConfig) (RunSpec, error) {
	s := RunSpec{
		RunID: c.RunID, Mixed: c.Mixed, Caps: Caps(c.Caps), VisibilityTimeoutSeconds: SecondsOf(c.VisibilityTimeout), MaxFails: c.MaxFails, MaxExpiries: c.MaxExpiries,
		Producers: c.Producers, ProducerTimeoutSeconds: SecondsOf(c.ProducerTimeout), LargestSample: c.LargestSample, StepsPerCheckpoint: c.StepsPerCheckpoint,
		SamplesPerStep: c.SamplesPerStep, TargetVersions: c.TargetVersions, MinDraftVersion: c.MinDraftVersion,
	}
	if c.Windows != nil {
		w := Windows(*c.Windows)
		s.Windows = &w
	}
	if c.Schema != nil {
		doc, err := json.Marshal(c.Schema)
		if err != nil {
			return s, err
		}
		s.Schema = doc
	}
	return s, nil
}

// Run describes a run.
type Run struct {
	Spec    RunSpec   `json:"spec" doc:"As resolved: defaults and marks filled in, the schema as a document."`
	Created time.Time `json:"created"`
	Store   StoreInfo `json:"store"`
	Status  Status    `json:"status"`
}

// StoreInfo says where a run's samples are, for a client that can see the same files.
type StoreInfo struct {
	URI         string `json:"uri" doc:"In every ref of the run."`
	Dir         string `json:"dir" doc:"Directory of the sample files, as the service names it."`
	StagingDir  string `json:"staging_dir" doc:"Where a producer on the same host may write a file that it then stages."`
	IDFile      string `json:"id_file" doc:"File that holds id: a client that reads the same there sees the same files, and may map them."`
	ID          string `json:"id" doc:"32 hexadecimal digits, made with the store."`
	Checksummed bool   `json:"checksummed" doc:"Whether a staged file is to carry a crc32c a feature: on disks, not in memory."`
}

// Judge is the body of POST /v1/check: whether a ref is what a schema promises, asked by who need not know how that is decided.
type Judge struct {
	Ref       sluice.Ref      `json:"ref"`
	Algorithm string          `json:"algorithm,omitempty" doc:"One of the built-in schemas. Give this or schema." example:"eagle3"`
	Schema    json.RawMessage `json:"schema,omitempty" doc:"A schema document. Give this or algorithm."`
}

// Against is the schema that the ref is held against. It is ErrInvalid if there is none, so that ErrSchema is the ref's fault alone.
func (j *Judge) Against() (*sluice.Schema, error) {
	schema, err := schemaOf(j.Algorithm, j.Schema)
	if err != nil {
		return nil, &sluice.Error{Kind: sluice.Invalid, Op: "check", Err: err}
	}
	return schema, nil
}

// RunList answers GET /v1/runs.
type RunList struct {
	Runs []Run `json:"runs"`
}

// CloseRun is the body of POST /v1/runs/{run}/close.
type CloseRun struct {
	Cause string `json:"cause,omitempty" doc:"Why, if this is not the regular end: consumers are told so after the drain." maxLength:"4096"`
}

// Reshape is the body of POST /v1/runs/{run}/reshape.
type Reshape struct {
	Ranks   int `json:"ranks"`
	PerRank int `json:"per_rank"`
}

// Configure is the body of POST /v1/runs/{run}/configure: [sluice.RunChange]. What is left out stays.
type Configure struct {
	VisibilityTimeoutSeconds *Seconds `json:"visibility_timeout_seconds,omitempty" doc:"How long a lease lives that is given from now on, or renewed if it had less."`
	HighWatermarkBytes       *int64   `json:"high_watermark_bytes,omitempty" doc:"Producers pause here: more than the low one, and at most the cap."`
	LowWatermarkBytes        *int64   `json:"low_watermark_bytes,omitempty" doc:"And go on here: 0 or more."`
	HighWatermarkSamples     *int64   `json:"high_watermark_samples,omitempty" doc:"The same for samples."`
	LowWatermarkSamples      *int64   `json:"low_watermark_samples,omitempty"`
	Reopen                   bool     `json:"reopen,omitempty" doc:"A run that was closed and is drained takes puts again; its cause and its producers' sessions are forgotten. One that is not closed stays as it is."`
}

// Change is that as the domain has it.
func (c *Configure) Change() sluice.RunChange {
	w := sluice.RunChange{HighWatermarkBytes: c.HighWatermarkBytes, LowWatermarkBytes: c.LowWatermarkBytes, HighWatermarkSamples: c.HighWatermarkSamples, LowWatermarkSamples: c.LowWatermarkSamples, Reopen: c.Reopen}
	if c.VisibilityTimeoutSeconds != nil {
		d := c.VisibilityTimeoutSeconds.Duration()
		w.VisibilityTimeout = &d
	}
	return w
}

// ConfigureOf is a change on the wire.
func ConfigureOf(c *sluice.RunChange) Configure {
	w := Configure{HighWatermarkBytes: c.HighWatermarkBytes, LowWatermarkBytes: c.LowWatermarkBytes, HighWatermarkSamples: c.HighWatermarkSamples, LowWatermarkSamples: c.LowWatermarkSamples, Reopen: c.Reopen}
	if c.VisibilityTimeout != nil {
		s := SecondsOf(*c.VisibilityTimeout)
		w.VisibilityTimeoutSeconds = &s
	}
	return w
}

// Versions is the body of POST /v1/runs/{run}/versions.
type Versions struct {
	TargetVersions  []string `json:"target_versions,omitempty"`
	MinDraftVersion string   `json:"min_draft_version,omitempty"`
}
