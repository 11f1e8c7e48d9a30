// Package rooms keeps the import rules of the house, which DESIGN.md explains: who may know whom.
package rooms

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/sluice-ml/sluice"

// rules say which of our own packages a room may import, the first matching room counts. "." is the domain package; a trailing /... takes everything below.
// Files of tests may import anything but a command.
var rules = []struct {
	room string
	may  []string
}{
	{".", nil},
	{"safetensors", []string{"."}},
	{"store/storetest", []string{".", "internal/fakeclock"}},
	{"store/...", []string{".", "safetensors"}},
	{"queue/queuetest", []string{".", "internal/fakeclock"}},
	{"queue", []string{"."}},
	{"journal/...", []string{"."}},
	{"target/...", []string{".", "safetensors"}},
	{"prompt", []string{"."}},
	{"stream", []string{"."}},
	{"client", []string{".", "safetensors", "internal/wire", "internal/httpcall"}},
	{"service/...", []string{".", "safetensors", "store/...", "queue", "journal/...", "internal/wire"}},
	{"internal/demo", []string{".", "client", "internal/wire", "safetensors", "store/...", "queue", "target/...", "prompt", "stream", "internal/scratch", "internal/child", "internal/gauge"}},
	{"internal/bench", []string{".", "store/...", "queue", "journal/...", "service/...", "client", "target/...", "internal/wire", "internal/httpcall", "internal/plan", "internal/scratch"}},
	{"internal/torture", []string{".", "client", "internal/wire", "internal/scratch", "internal/child"}},
	{"internal/inspect", []string{".", "safetensors", "store/dirstore"}},
	{"internal/...", []string{"."}},
	{"cmd/...", []string{"...", "."}},
	{"examples/...", []string{"...", "."}},
}

// A room inside another one's folder belongs to it: store/memstore may import store/memstore/x.

func matches(pattern, room string) bool {
	if p, ok := strings.CutSuffix(pattern, "..."); ok {
		p = strings.TrimSuffix(p, "/")
		return p == "" || room == p || strings.HasPrefix(room, p+"/")
	}
	return pattern == room
}

func mayOf(room string) ([]string, bool) {
	for _, r := range rules {
		if matches(r.room, room) {
			return r.may, true
		}
	}
	return nil, false
}

type importLine struct{ file, room, path string }

// imports lists every import of every Go file of the module.
func imports(t *testing.T) []importLine {
	t.Helper()
	root := os.DirFS("../..")
	if _, err := fs.Stat(root, "go.mod"); err != nil {
		t.Fatal(err)
	}
	var lines []importLine
	err := fs.WalkDir(root, ".", func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			name := d.Name()
			if file != "." && (strings.HasPrefix(name, ".") || name == "testdata" || name == "tools" || name == "python") {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(file, ".go") {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join("../..", file), nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		for _, spec := range f.Imports {
			p, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			lines = append(lines, importLine{file, path.Dir(file), p})
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(lines) < 50 {
		t.Fatalf("only %d imports found; the walk has missed the module", len(lines))
	}
	return lines
}

// broken says what is wrong with an import, or "".
func broken(l importLine) string {
	test := strings.HasSuffix(l.file, "_test.go")
	inside, ours := strings.CutPrefix(l.path, module)
	switch {
	case !ours && l.room == "." && !test && strings.Contains(strings.Split(l.path, "/")[0], "."):
		return "the domain package imports the standard library only"
	case !ours:
		return ""
	}
	to := strings.TrimPrefix(inside, "/")
	if to == "" {
		to = "."
	}
	may, known := mayOf(l.room)
	switch {
	case !known:
		return "no rule for the room " + l.room
	case test && !strings.HasPrefix(to, "cmd/"), to == l.room, strings.HasPrefix(to, l.room+"/") && l.room != ".":
		return ""
	case slices.ContainsFunc(may, func(p string) bool { return matches(p, to) }):
		return ""
	}
	return l.room + " may not know " + to
}

func TestRoomsKnowOnlyWhomTheyMay(t *testing.T) {
	t.Parallel()
	for _, l := range imports(t) {
		if why := broken(l); why != "" {
			t.Errorf("%s imports %s: %s", l.file, l.path, why)
		}
	}
}

func TestRulesCatchWhatTheyAreFor(t *testing.T) {
	t.Parallel()
	for _, l := range []importLine{
		{"ref.go", ".", module + "/queue"},
		{"ref.go", ".", "golang.org/x/sys/unix"},
		{"store/memstore/x.go", "store/memstore", module + "/store/dirstore"},
		{"queue/x.go", "queue", module + "/stream"},
		{"stream/x.go", "stream", module + "/store/memstore"},
		{"target/tinyllama/x.go", "target/tinyllama", module + "/prompt"},
		{"prompt/x.go", "prompt", module + "/target/tinyllama"},
		{"attic/x.go", "attic", module},
		{"stream/x_test.go", "stream", module + "/cmd/sluice"},
	} {
		if broken(l) == "" {
			t.Errorf("%s may import %s", l.file, l.path)
		}
	}
}

func TestNoRoomIsADrawer(t *testing.T) {
	t.Parallel()
	for _, l := range imports(t) {
		for part := range strings.SplitSeq(l.room, "/") {
			if slices.Contains([]string{"util", "utils", "common", "helper", "helpers", "misc", "manager"}, part) {
				t.Errorf("%s lies in a room called %q: name it after what it holds", l.file, part)
			}
		}
	}
}
