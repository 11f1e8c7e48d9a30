// Package metrics shows the service to Prometheus.
//
// What runs and stores count is read from one status when Prometheus asks, so that the figures of a scrape belong together and cost nothing in between. What HTTP does is
// counted as it happens. Names follow the conventions: sluice_ first, base units (bytes, seconds, samples, tokens), _total for what only grows. Counters of a run begin with the run, not
// with the process: they survive a restart, and so rate() sees no reset.
package metrics

import (
	"context"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/sluice-ml/sluice/internal/wire"
)

// Metrics is a registry of its own: two services in one process do not meet.
type Metrics struct {
	registry *prometheus.Registry
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	received prometheus.Counter
	sent     prometheus.Counter
}

// New makes the metrics of a service whose state status tells.
func New(status func(context.Context) wire.ServiceStatus) *Metrics {
	m := &Metrics{
		registry: prometheus.NewRegistry(),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "sluice_http_requests_total", Help: "HTTP calls answered, by route, method and status code."}, []string{"route", "method", "code"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "sluice_http_request_duration_seconds", Help: "Time from a call's arrival to the end of its answer, in seconds; calls that wait on purpose (reserve, acquire) include the wait.",
			Buckets: []float64{0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 30, 60},
		}, []string{"route"}),
		received: prometheus.NewCounter(prometheus.CounterOpts{Name: "sluice_http_received_bytes_total", Help: "Bytes of the bodies of calls that succeeded, as their lengths were declared: uploads, above all."}),
		sent:     prometheus.NewCounter(prometheus.CounterOpts{Name: "sluice_http_sent_bytes_total", Help: "Bytes of answers, as their lengths were declared: downloads, above all."}),
	}
	m.registry.MustRegister(m.requests, m.seconds, m.received, m.sent, &scrape{status}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Handler answers a scrape.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

// Answered counts an HTTP call; lengths below zero are unknown. route is the pattern that matched, never the path, so that the number of series stays bounded.
func (m *Metrics) Answered(route, method string, code int, took time.Duration, received, sent int64) {
	m.requests.WithLabelValues(route, method, strconv.Itoa(code)).Inc()
	m.seconds.WithLabelValues(route).Observe(took.Seconds())
	m.received.Add(float64(max(received, 0)))
	m.sent.Add(float64(max(sent, 0)))
}

// scrape makes metrics of a status.
type scrape struct {
	status func(context.Context) wire.ServiceStatus
}

// series is one metric of a run.
type series struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	of   func(*wire.Status) float64
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

var (
	labels = []string{"run"}

	buildInfo = prometheus.NewDesc("sluice_build_info", "Always 1; the labels say which build serves, with which durability.", []string{"version", "durability"}, nil)
	ready     = prometheus.NewDesc("sluice_ready", "1 when every run is open.", nil, nil)
	started   = prometheus.NewDesc("sluice_start_time_seconds", "When the service started, in seconds since 1970.", nil, nil)
	capLimit  = prometheus.NewDesc("sluice_max_bytes", "What the caps of all runs may add up to, in bytes.", nil, nil)
	capUsed   = prometheus.NewDesc("sluice_cap_bytes", "What the caps of all runs add up to, in bytes.", nil, nil)
	sessions  = prometheus.NewDesc("sluice_sessions", "Client processes that hold a session.", nil, nil)
	abandoned = prometheus.NewDesc("sluice_samples_abandoned_total", "Samples that were uploaded or staged, never committed, and freed. It begins with the process.", nil, nil)
	runs      = prometheus.NewDesc("sluice_runs", "Runs that the service has.", nil, nil)

	up = prometheus.NewDesc("sluice_run_up", "1 when the run answers; one that can't, because its journal failed for one, has no other series.", labels, nil)

	perRun = []series{
		counter("samples_put_total", "Samples enqueued.", func(s *wire.Status) float64 { return float64(s.Put) }),
		counter("samples_delivered_total", "Leases handed out.", func(s *wire.Status) float64 { return float64(s.Delivered) }),
		counter("samples_redelivered_total", "Leases handed out that were not the first of their sample.", func(s *wire.Status) float64 { return float64(s.Redelivered) }),
		counter("samples_padded_total", "Stand-in leases that filled up a window.", func(s *wire.Status) float64 { return float64(s.Padded) }),
		counter("samples_acked_total", "Samples trained on.", func(s *wire.Status) float64 { return float64(s.Acked) }),
		counter("samples_failed_total", "Deliveries that a consumer failed.", func(s *wire.Status) float64 { return float64(s.Failed) }),
		counter("samples_expired_total", "Leases that ran out.", func(s *wire.Status) float64 { return float64(s.Expired) }),
		counter("samples_returned_total", "Deliveries given back unused.", func(s *wire.Status) float64 { return float64(s.Returned) }),
		counter("samples_dead_total", "Samples that became dead letters.", func(s *wire.Status) float64 { return float64(s.DeadTotal) }),
		counter("samples_dropped_total", "Dead letters dropped by hand.", func(s *wire.Status) float64 { return float64(s.Dropped) }),
		counter("samples_tail_dropped_total", "Samples of an incomplete last window that were dropped.", func(s *wire.Status) float64 { return float64(s.TailDropped) }),
		counter("samples_gated_total", "Samples that a version gate dropped.", func(s *wire.Status) float64 { return float64(s.Gated) }),
		counter("stale_calls_total", "Calls that came too late: with a lease or an incarnation that was superseded.", func(s *wire.Status) float64 { return float64(s.Stale) }),
		counter("tokens_put_total", "Tokens of samples enqueued.", func(s *wire.Status) float64 { return float64(s.TokensPut) }),
		counter("tokens_acked_total", "Tokens of samples trained on.", func(s *wire.Status) float64 { return float64(s.TokensAcked) }),
		counter("put_bytes_total", "Bytes of samples enqueued.", func(s *wire.Status) float64 { return float64(s.BytesPut) }),
		counter("acked_bytes_total", "Bytes of samples trained on.", func(s *wire.Status) float64 { return float64(s.BytesAcked) }),
		counter("windows_opened_total", "Windows opened to the ranks.", func(s *wire.Status) float64 { return float64(s.WindowsOpened) }),
		counter("producer_paused_seconds_total", "Time in which at least one producer waited at the gate, in seconds. It begins with the process.", func(s *wire.Status) float64 { return float64(s.ProducerPausedSeconds) }),
		counter("consumer_waited_seconds_total", "Time in which at least one consumer waited for a sample, in seconds. It begins with the process.", func(s *wire.Status) float64 { return float64(s.ConsumerWaitedSeconds) }),

		gauge("pending_samples", "Samples that wait for a lease.", func(s *wire.Status) float64 { return float64(s.Pending) }),
		gauge("leased_samples", "Samples that are leased.", func(s *wire.Status) float64 { return float64(s.Outstanding) }),
		gauge("dead_samples", "Dead letters.", func(s *wire.Status) float64 { return float64(s.Dead) }),
		gauge("resident_bytes", "Bytes of samples in the store.", func(s *wire.Status) float64 { return float64(s.Health.ResidentBytes) }),
		gauge("resident_samples", "Samples in the store.", func(s *wire.Status) float64 { return float64(s.Health.ResidentSamples) }),
		gauge("reserved_bytes", "Bytes set aside for samples that are being produced.", func(s *wire.Status) float64 { return float64(s.Health.ReservedBytes) }),
		gauge("reserved_samples", "Samples that are being produced.", func(s *wire.Status) float64 { return float64(s.Health.ReservedSamples) }),
		gauge("staging_bytes", "Bytes being written, part of the reserved.", func(s *wire.Status) float64 { return float64(s.Health.StagingBytes) }),
		gauge("dead_bytes", "Bytes of dead letters, part of the resident.", func(s *wire.Status) float64 { return float64(s.Health.DeadBytes) }),
		gauge("pool_bytes", "Bytes of files kept for recycling, beside the resident.", func(s *wire.Status) float64 { return float64(s.Health.PoolBytes) }),
		gauge("cap_bytes", "The run's cap in bytes; 0 is none.", func(s *wire.Status) float64 { return float64(s.Health.Caps.MaxBytes) }),
		gauge("cap_samples", "The run's cap in samples; 0 is none.", func(s *wire.Status) float64 { return float64(s.Health.Caps.MaxSamples) }),
		gauge("high_watermark_bytes", "Producers pause at this use.", func(s *wire.Status) float64 { return float64(s.Health.Caps.HighWatermarkBytes) }),
		gauge("low_watermark_bytes", "Paused producers go on at this use.", func(s *wire.Status) float64 { return float64(s.Health.Caps.LowWatermarkBytes) }),
		gauge("high_watermark_samples", "Producers pause at this use.", func(s *wire.Status) float64 { return float64(s.Health.Caps.HighWatermarkSamples) }),
		gauge("low_watermark_samples", "Paused producers go on at this use.", func(s *wire.Status) float64 { return float64(s.Health.Caps.LowWatermarkSamples) }),
		gauge("closed", "1 when no more samples may be put.", func(s *wire.Status) float64 { return truth(s.Closed) }),
		gauge("paused", "1 when the gate is closed at the high mark.", func(s *wire.Status) float64 { return truth(s.Paused) }),
		gauge("starving", "1 when a consumer waits and nothing is deliverable to it.", func(s *wire.Status) float64 { return truth(s.Starving) }),
		gauge("wedged", "1 when both sides wait and nothing can move: alert on this.", func(s *wire.Status) float64 { return truth(s.Wedged != "") }),
		gauge("missing_ranks", "Ranks without a living consumer that the others wait for.", func(s *wire.Status) float64 { return float64(len(s.MissingRanks)) }),
		gauge("producers", "Producers that are known.", func(s *wire.Status) float64 { return float64(len(s.Producers)) }),
		gauge("consumers", "Consumers that are known.", func(s *wire.Status) float64 { return float64(len(s.Consumers)) }),
		gauge("producers_waiting", "Producers' calls that wait at the gate.", func(s *wire.Status) float64 { return float64(s.ProducersWaiting) }),
		gauge("consumers_waiting", "Consumers' calls that wait for a sample.", func(s *wire.Status) float64 { return float64(s.ConsumersWaiting) }),
		gauge("oldest_lease_seconds", "Age of the oldest lease, in seconds; 0 when none is out.", func(s *wire.Status) float64 { return float64(s.OldestLeaseSeconds) }),
	}
)

func counter(name, help string, of func(*wire.Status) float64) series {
	return series{prometheus.NewDesc("sluice_run_"+name, help, labels, nil), prometheus.CounterValue, of}
}

func gauge(name, help string, of func(*wire.Status) float64) series {
	return series{prometheus.NewDesc("sluice_run_"+name, help, labels, nil), prometheus.GaugeValue, of}
}

func (c *scrape) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{buildInfo, ready, started, capLimit, capUsed, sessions, abandoned, runs, up} {
		out <- d
	}
	for i := range perRun {
		out <- perRun[i].desc
	}
}

func (c *scrape) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	s := c.status(ctx)
	set := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	set(buildInfo, 1, s.Version, s.Durability)
	set(ready, truth(s.Ready))
	set(started, float64(s.Started.UnixMilli())/1e3)
	if s.MaxBytes > 0 { // there is no series where there is no limit
		set(capLimit, float64(s.MaxBytes))
	}
	set(capUsed, float64(s.CapBytes))
	set(sessions, float64(s.Sessions))
	out <- prometheus.MustNewConstMetric(abandoned, prometheus.CounterValue, float64(s.Abandoned))
	set(runs, float64(len(s.Runs)))
	for i := range s.Runs {
		set(up, truth(s.Runs[i].Unavailable == ""), s.Runs[i].RunID)
		if s.Runs[i].Unavailable != "" {
			continue // its counters are not zero, they are not known: a gap is no reset
		}
		for _, m := range perRun {
			out <- prometheus.MustNewConstMetric(m.desc, m.kind, m.of(&s.Runs[i]), s.Runs[i].RunID)
		}
	}
}
