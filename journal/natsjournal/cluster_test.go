package natsjournal

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/sluice-ml/sluice"
)

// startCluster starts three servers on loopback.
func startCluster(t *testing.T) []*server.Server {
	t.Helper()
	const n = 3
	var ports [n]int
	var routes []*url.URL
	for i := range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		ports[i] = l.Addr().(*net.TCPAddr).Port
		routes = append(routes, &url.URL{Scheme: "nats", Host: l.Addr().String()})
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	servers := make([]*server.Server, n)
	for i := range n {
		servers[i] = startServer(t, func(o *server.Options) {
			o.ServerName = fmt.Sprint("n", i)
			o.Cluster = server.ClusterOpts{Name: "c", Host: "127.0.0.1", Port: ports[i]}
			o.Routes = routes
		})
	}
	for deadline := time.Now().Add(20 * time.Second); !slices.ContainsFunc(servers, (*server.Server).JetStreamIsLeader) || !slices.ContainsFunc(servers, (*server.Server).JetStreamIsCurrent); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the cluster has no leader")
		}
	}
	return servers
}

// On three servers of which the one that leads the journal goes away: nothing that was acknowledged is lost and nothing is there twice.
func TestACluster(t *testing.T) {
	t.Parallel()
	servers := startCluster(t)
	var urls []string
	for _, s := range servers {
		urls = append(urls, s.ClientURL())
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	js, err := Connect(ctx, strings.Join(urls, ","), &Options{Replicas: 3})
	if err != nil {
		t.Fatal(err)
	}
	defer js.Close()
	if _, err := Connect(ctx, servers[1].ClientURL(), &Options{Replicas: 3}); !errors.Is(err, sluice.ErrConflict) {
		t.Errorf("a second service: %v, want conflict", err)
	}
	first, err := js.Journal(ctx, "a")
	if err != nil {
		t.Fatal(err)
	}
	j := first.(*journal)
	var want []string
	write := func(n int) {
		t.Helper()
		for range n {
			want = append(want, fmt.Sprint(len(want), strings.Repeat("x", 10_000)))
			if err := j.Append(ctx, []sluice.Record{{Data: []byte(want[len(want)-1])}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	write(50)
	info, err := j.stream.Info(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range servers {
		if s.Name() == info.Cluster.Leader {
			s.Shutdown()
			s.WaitForShutdown()
		}
	}
	write(50)
	again, err := js.Journal(ctx, "a")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := contents(again); err != nil || !slices.Equal(got, want) {
		t.Errorf("%d of %d records came back, %v", len(got), len(want), err)
	}
	if err := again.Compact(ctx, []sluice.Record{{Data: []byte("snapshot")}}); err != nil {
		t.Fatal(err)
	}
	if err := j.Append(ctx, []sluice.Record{{}}); !errors.Is(err, sluice.ErrStale) {
		t.Errorf("the earlier writer: %v, want stale", err)
	}
	third, err := js.Journal(ctx, "a")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := contents(third); err != nil || !slices.Equal(got, []string{"snapshot"}) {
		t.Errorf("%q, %v", got, err)
	}
}
