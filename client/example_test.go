package client_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/client"
	"github.com/sluice-ml/sluice/service"
	"github.com/sluice-ml/sluice/service/access"
)

// startService is `sluice serve` in the small: it returns the path of a socket.
func startService() (socket string, stop func(), err error) {
	dir, err := os.MkdirTemp("", "sluice-example-")
	if err != nil {
		return "", nil, err
	}
	s, err := service.Open(context.Background(), service.Options{StateDir: filepath.Join(dir, "state"), StoreDir: filepath.Join(dir, "store"), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return "", nil, err
	}
	socket = filepath.Join(dir, "sluice.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		return "", nil, err
	}
	caller := access.Caller{Name: "example", Role: access.Operator, UID: os.Getuid()}
	h := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.Handler().ServeHTTP(w, r.WithContext(access.WithCaller(r.Context(), caller)))
	})}
	go h.Serve(l) // ends with stop
	return socket, func() {
		h.Close()
		s.Close(context.Background())
		os.RemoveAll(dir)
	}, nil
}

func Example() {
	socket, stop, err := startService()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()

	ctx := context.Background()
	c, err := client.Dial(ctx, client.Options{URL: "unix:" + socket, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()
	schema, err := sluice.ParseSchema([]byte(`{"name":"bytes","version":1,"features":[{"name":"x","axes":["N"],"dtypes":["uint8"],"required":true}]}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	if _, err := c.CreateRun(ctx, sluice.RunConfig{RunID: "r1", Schema: schema, Caps: sluice.Caps{MaxBytes: 1 << 20}}); err != nil {
		fmt.Println(err)
		return
	}
	run, err := c.Open(ctx, "r1")
	if err != nil {
		fmt.Println(err)
		return
	}
	store, queue := run.Store(), run.Queue()

	// A producer: ask for room before the work, put the tensors, then their ref.
	sample := &sluice.Sample{SampleID: "s-1", RunID: "r1", Algorithm: "bytes", SchemaVersion: 1, NumTokens: 3,
		Features: []sluice.Feature{{Name: "x", Tensor: sluice.TensorOf(sluice.UInt8, []uint8{1, 2, 3}, 3)}}}
	room, err := queue.Reserve(ctx, sluice.ReserveRequest{Bytes: sample.Bytes()})
	if err != nil {
		fmt.Println(err)
		return
	}
	ref, err := store.Put(ctx, sample, room)
	if err != nil {
		fmt.Println(err)
		return
	}
	if _, err := queue.Put(ctx, sluice.PutRequest{Ref: ref}); err != nil {
		fmt.Println(err)
		return
	}
	if err := queue.Close(ctx, nil); err != nil {
		fmt.Println(err)
		return
	}

	// A consumer, normally in another process.
	me := sluice.Consumer{Name: "trainer"}
	for {
		d, err := queue.Acquire(ctx, sluice.AcquireRequest{Consumer: me, Wait: -1})
		if err != nil || d.End {
			fmt.Println("the end:", d.End, err)
			return
		}
		for _, lease := range d.Leases {
			tensors, err := store.Get(ctx, lease.Ref)
			if err != nil {
				fmt.Println(err)
				return
			}
			fmt.Printf("%s %v\n", lease.Ref.SampleID(), tensors.Features[0].Data)
			if _, err := queue.Settle(ctx, sluice.SettleRequest{Consumer: me, Settlements: []sluice.Settlement{{Lease: lease.ID, Verdict: sluice.Ack}}}); err != nil {
				fmt.Println(err)
			}
			if err := tensors.Release(ctx); err != nil {
				fmt.Println(err)
			}
		}
	}
	// Output:
	// s-1 [1 2 3]
	// the end: true <nil>
}
