package memstore

import (
	"bytes"
	"errors"
	"os"
	"path"
	"strconv"
)

// freeMemory is the least of what the machine has available and what the memory cgroups of this process leave it. The page cache of files
// counts as free, since the kernel drops it when memory is wanted.
func freeMemory() (int64, error) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	kib, ok := field(text, "MemAvailable:")
	if !ok {
		return 0, errors.New("/proc/meminfo has no MemAvailable")
	}
	left := kib << 10
	groups, _ := os.ReadFile("/proc/self/cgroup")
	for line := range bytes.Lines(groups) {
		// "0::/path" is the one hierarchy of version 2, "4:memory:/path" a hierarchy of version 1.
		parts := bytes.SplitN(bytes.TrimSpace(line), []byte(":"), 3)
		if len(parts) != 3 {
			continue
		}
		root, limit, usage, prefix := "/sys/fs/cgroup", "memory.max", "memory.current", ""
		switch controllers := string(parts[1]); {
		case controllers == "memory":
			root, limit, usage, prefix = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
		case controllers != "":
			continue
		}
		// Within a container the path may be the host's, of which only the end is visible, or nothing: then the root is our own group.
		for dir := path.Clean("/" + string(parts[2])); ; dir = path.Dir(dir) {
			if n, ok := groupLeft(path.Join(root, dir), limit, usage, prefix); ok {
				left = min(left, n)
			}
			if dir == "/" {
				break
			}
		}
	}
	return max(left, 0), nil
}

func groupLeft(dir, limit, usage, prefix string) (int64, bool) {
	most, ok := number(path.Join(dir, limit))
	if !ok || most >= 1<<60 { // "max", or version 1's way to say so
		return 0, false
	}
	now, ok := number(path.Join(dir, usage))
	if !ok {
		return 0, false
	}
	stat, _ := os.ReadFile(path.Join(dir, "memory.stat"))
	active, _ := field(stat, prefix+"active_file")
	inactive, _ := field(stat, prefix+"inactive_file")
	return most - now + active + inactive, true
}

func number(file string) (int64, bool) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(string(bytes.TrimSpace(text)), 10, 64)
	return n, err == nil
}

// field finds the number behind a name at the start of a line.
func field(text []byte, name string) (int64, bool) {
	for line := range bytes.Lines(text) {
		if f := bytes.Fields(line); len(f) >= 2 && string(f[0]) == name {
			n, err := strconv.ParseInt(string(f[1]), 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}
