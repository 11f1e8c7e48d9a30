package access

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
)

// BenchmarkDoor compares a small JSON call through the door with the same on a bare server.
func BenchmarkDoor(b *testing.B) {
	answer := func(w http.ResponseWriter, r *http.Request) {
		data, err := io.ReadAll(r.Body)
		if err != nil {
			panic(err)
		}
		w.Header().Set("Content-Type", "application/json")
		w.Write(data)
	}
	const body = `{"consumer":{"name":"c","incarnation":1},"settlements":[{"lease":"0123456789abcdef0123456789abcdef","verdict":"ack"}]}`
	calls := func(b *testing.B, url, token string) {
		client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
		defer client.CloseIdleConnections()
		b.SetParallelism(8)
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				r, err := http.NewRequest(http.MethodPost, url+"/v1/runs/r/settle", strings.NewReader(body))
				if err != nil {
					b.Fatal(err)
				}
				r.Header.Set("Content-Type", "application/json")
				r.Header.Set("Authorization", "Bearer "+token)
				resp, err := client.Do(r)
				if err != nil {
					b.Fatal(err)
				}
				io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
				if resp.StatusCode != http.StatusOK {
					b.Fatal(resp.Status)
				}
			}
		})
	}
	b.Run("door", func(b *testing.B) {
		dir, err := os.MkdirTemp("", "door")
		if err != nil {
			b.Fatal(err)
		}
		defer os.RemoveAll(dir)
		d, err := Open(Options{StateDir: dir, Listen: "127.0.0.1:0", Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			b.Fatal(err)
		}
		ctx, cancel := context.WithCancel(b.Context())
		ended := make(chan error, 1)
		go func() { ended <- d.Serve(ctx, http.HandlerFunc(answer)) }()
		made, err := CreateToken(dir, "bench", Consumer, "")
		if err != nil {
			b.Fatal(err)
		}
		calls(b, d.Endpoint().URL, made.Value)
		cancel()
		if err := <-ended; err != nil {
			b.Error(err)
		}
	})
	b.Run("bare", func(b *testing.B) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			b.Fatal(err)
		}
		s := &http.Server{Handler: http.HandlerFunc(answer)}
		go s.Serve(l)
		defer s.Close()
		calls(b, "http://"+l.Addr().String(), "x")
	})
}
