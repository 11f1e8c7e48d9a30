package metrics_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/service/metrics"
)

func status(context.Context) wire.ServiceStatus {
	return wire.ServiceStatus{
		Version: "v1", Durability: "process", Ready: true, Started: time.Unix(1000, 0), MaxBytes: 100, CapBytes: 60, Sessions: 2, Abandoned: 3,
		Runs: []wire.Status{{
			RunID: "r1", Put: 7, Acked: 5, Pending: 1, Outstanding: 1, Wedged: "both wait", ProducerPausedSeconds: 1.5, OldestLeaseSeconds: 2, MissingRanks: []int{1, 3},
			Health: sluice.Health{ResidentBytes: 20, Caps: sluice.Caps{MaxBytes: 60, HighWatermarkBytes: 45, LowWatermarkBytes: 15}},
		}, {RunID: "r2"}, {RunID: "r3", Unavailable: "is being opened"}},
	}
}

func scrape(t *testing.T, m *metrics.Metrics) string {
	t.Helper()
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if w.Code != http.StatusOK {
		t.Fatal(w.Code, w.Body.String())
	}
	return w.Body.String()
}

func TestAScrapeSaysWhatTheStatusSays(t *testing.T) {
	t.Parallel()
	m := metrics.New(status)
	m.Answered("/v1/runs/{run}/acquire", "POST", 200, 3*time.Millisecond, 10, 200)
	text := scrape(t, m)
	for _, want := range []string{
		`sluice_run_samples_put_total{run="r1"} 7`, `sluice_run_samples_acked_total{run="r1"} 5`, `sluice_run_samples_put_total{run="r2"} 0`,
		`sluice_run_wedged{run="r1"} 1`, `sluice_run_missing_ranks{run="r1"} 2`, `sluice_run_missing_ranks{run="r2"} 0`, `sluice_run_wedged{run="r2"} 0`, `sluice_run_up{run="r2"} 1`, `sluice_run_up{run="r3"} 0`, `sluice_run_resident_bytes{run="r1"} 20`, `sluice_run_high_watermark_bytes{run="r1"} 45`,
		`sluice_run_producer_paused_seconds_total{run="r1"} 1.5`, `sluice_build_info{durability="process",version="v1"} 1`, `sluice_ready 1`, `sluice_sessions 2`, `sluice_samples_abandoned_total 3`,
		`sluice_http_requests_total{code="200",method="POST",route="/v1/runs/{run}/acquire"} 1`, `sluice_http_sent_bytes_total 200`,
		`sluice_http_request_duration_seconds_bucket{route="/v1/runs/{run}/acquire",le="0.005"} 1`,
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("the scrape has no line %s", want)
		}
	}
	if strings.Count(text, `run="r3"`) != 1 {
		t.Error("a run that is not open has counters: when it is open, they jump")
	}
}

func TestNamesFollowTheConventions(t *testing.T) {
	t.Parallel()
	m := metrics.New(status)
	m.Answered("/", "GET", 200, 0, 0, 0)
	var ours strings.Builder
	for line := range strings.Lines(scrape(t, m)) {
		if strings.Contains(line, "sluice_") {
			ours.WriteString(line)
		}
	}
	problems, err := promlint.New(strings.NewReader(ours.String())).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

// TestTheGrafanaDashboardAsksForMetricsThatExist keeps the example in docs from going stale.
func TestTheGrafanaDashboardAsksForMetricsThatExist(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("../../docs/grafana.json")
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			Title   string `json:"title"`
			Targets []struct {
				Expr string `json:"expr"`
			} `json:"targets"`
		} `json:"panels"`
	}
	if err := json.Unmarshal(data, &board); err != nil {
		t.Fatal(err)
	}
	m := metrics.New(status)
	m.Answered("/", "GET", 200, 0, 0, 0)
	text := scrape(t, m)
	name := regexp.MustCompile(`sluice_[a-z_]+`)
	asked := 0
	for _, p := range board.Panels {
		for _, target := range p.Targets {
			for _, n := range name.FindAllString(target.Expr, -1) {
				asked++
				if !regexp.MustCompile(`(?m)^` + n + `[{ ]`).MatchString(text) {
					t.Errorf("panel %q asks for %s, which is not there", p.Title, n)
				}
			}
		}
	}
	if asked < 20 {
		t.Errorf("the dashboard asks for %d metrics; has it been read?", asked)
	}
}
