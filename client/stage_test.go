package client

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/sluice-ml/sluice"
)

// A service that is killed while it takes a staged file takes it along. Whoever puts must hear that the put may be repeated, and not that something was not found.
func TestAPutWhoseFileWentWithTheServiceMayBeRepeated(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	var dir string
	takesAlong := func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !strings.HasSuffix(r.URL.Path, "/stage") || calls.Add(1) > 1 {
				h.ServeHTTP(w, r)
				return
			}
			files, err := filepath.Glob(filepath.Join(dir, "*"))
			if err != nil || len(files) != 1 {
				t.Errorf("in the staging directory lie %v, %v", files, err)
				return
			}
			if err := os.Remove(files[0]); err != nil {
				t.Error(err)
			}
			panic(http.ErrAbortHandler)
		})
	}
	l := serve(t, tmpfs(t), nil, takesAlong)
	c := l.dial(overUnix, nil)
	s := l.run(c, bytesRun(100_000)).Store()
	dir = l.storeInfo(c, "r1").StagingDir
	room, err := s.Reserve(bg, 5003)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Put(bg, sampleOf(2), room); !errors.Is(err, sluice.ErrUnavailable) || errors.Is(err, sluice.ErrNotFound) {
		t.Fatalf("got %v, want ErrUnavailable alone", err)
	}
	if calls.Load() != 2 {
		t.Errorf("it was staged %d times, want 2", calls.Load())
	}
	ref, err := s.Put(bg, sampleOf(2), room)
	if err != nil {
		t.Fatal(err)
	}
	if h := s.Health(); h.ResidentBytes != 5003 || h.ReservedBytes != 0 {
		t.Errorf("health %+v, want 5003 bytes resident and none reserved", h)
	}
	if err := s.Abort(bg, ref); err != nil {
		t.Error(err)
	}
}
