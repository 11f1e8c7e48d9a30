package service

import (
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/sluice-ml/sluice/service/access"
)

// The commands of docs/api.md are run, in one shell, against a service.
func TestTheCommandsOfTheDocumentationWork(t *testing.T) {
	t.Parallel()
	shell, err := exec.LookPath("bash")
	if err != nil {
		t.Skip(err)
	}
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip(err)
	}
	page, err := os.ReadFile("../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	var script strings.Builder
	script.WriteString("set -eux\n")
	blocks := 0
	for rest := string(page); ; blocks++ {
		_, after, ok := strings.Cut(rest, "```sh\n")
		if !ok {
			break
		}
		block, behind, ok := strings.Cut(after, "```\n")
		if !ok {
			t.Fatal("a block without an end")
		}
		script.WriteString(block)
		rest = behind
	}
	if blocks < 10 {
		t.Fatalf("%d blocks found", blocks)
	}
	b := newBed(t, Options{})
	socket := shortDir(t) + "/s"
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b.s.Handler().ServeHTTP(w, r.WithContext(access.WithCaller(r.Context(), b.as)))
	})}
	go srv.Serve(l) // ends with Close
	defer srv.Close()
	work := t.TempDir()
	cmd := exec.Command(shell, "-c", script.String())
	cmd.Dir = work
	cmd.Env = append(os.Environ(), "SOCKET="+socket)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{`"status":"enqueued"`, `"status":"already"`, `"ranges":[[17,18]]`, `"status":"renewed"`, `"status":"settled"`, `"acked":1`, `"end":true`, `"code":"not_found"`} {
		if !strings.Contains(string(out), want) {
			t.Errorf("%s does not come about:\n%s", want, out)
		}
	}
	for name, size := range map[string]int64{"first-id.bin": 8} {
		if st, err := os.Stat(work + "/" + name); err != nil || st.Size() != size {
			t.Errorf("%s: %v, %v", name, st, err)
		}
	}
	if st := b.s.Status(t.Context()); len(st.Runs) != 0 || st.CapBytes != 0 {
		t.Errorf("left: %+v", st)
	}
}
