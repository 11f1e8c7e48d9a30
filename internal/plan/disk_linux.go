package plan

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
)

// DefaultStore is where samples lie best, if it is there.
const DefaultStore = "/dev/shm"

// The names are those that a store in a directory uses, and so is the line between local and shared.
var local = map[int64]string{unix.TMPFS_MAGIC: "tmpfs", unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs", unix.BTRFS_SUPER_MAGIC: "btrfs", unix.OVERLAYFS_SUPER_MAGIC: "overlay"}

var network = map[int64]string{
	unix.NFS_SUPER_MAGIC: "nfs", unix.SMB_SUPER_MAGIC: "smb", unix.CIFS_SUPER_MAGIC: "cifs", unix.SMB2_SUPER_MAGIC: "smb2", unix.CEPH_SUPER_MAGIC: "ceph",
	unix.AFS_SUPER_MAGIC: "afs", unix.AFS_FS_MAGIC: "afs", unix.CODA_SUPER_MAGIC: "coda", unix.NCP_SUPER_MAGIC: "ncp", unix.V9FS_MAGIC: "9p", unix.FUSE_SUPER_MAGIC: "fuse",
	unix.OCFS2_SUPER_MAGIC: "ocfs2", 0x01161970: "gfs2", 0x0bd00bd0: "lustre", 0x47504653: "gpfs", 0x19830326: "beegfs", 0xaad7aaea: "panfs", 0x61756673: "aufs", 0x786f4256: "vboxsf",
}

// Look reads what there is to know about the file system of dir; nothing is written. A directory that does not exist yet lies where its parent does.
func Look(dir string) (*Disk, error) {
	fail := func(kind sluice.Kind, detail string, err error) error {
		return &sluice.Error{Kind: kind, Op: "plan: store", Subject: dir, Detail: detail, Err: err}
	}
	at := filepath.Clean(dir)
	info, err := os.Stat(at)
	if errors.Is(err, fs.ErrNotExist) {
		at = filepath.Dir(at)
		info, err = os.Stat(at)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fail(sluice.NotFound, "neither it nor the directory above it exists", nil)
	case err != nil:
		return nil, fail(sluice.Denied, "cannot look at it", err)
	case !info.IsDir():
		return nil, fail(sluice.Invalid, fmt.Sprintf("%s is not a directory", at), nil)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(at, &st); err != nil {
		return nil, fail(sluice.Denied, "statfs", err)
	}
	d := &Disk{Path: dir, TotalBytes: blocks(st.Blocks, st.Bsize), FreeBytes: blocks(st.Bavail, st.Bsize), LimitedBy: "file system"}
	kind := int64(uint32(st.Type))
	if name, ok := network[kind]; ok {
		d.Type, d.Network = name, true
	} else if d.Type, ok = local[kind]; !ok {
		d.Type = fmt.Sprintf("%#x", kind)
	}
	d.RoomBytes = d.FreeBytes
	if kind == unix.TMPFS_MAGIC {
		if n, ok := availableMemory(); ok && n < d.RoomBytes {
			d.RoomBytes, d.LimitedBy = n, "available memory"
		}
		if n := groupRoom("/proc/self/cgroup", "/sys/fs/cgroup"); n < d.RoomBytes {
			d.RoomBytes, d.LimitedBy = n, "memory cgroup"
		}
	}
	return d, nil
}

func blocks[B int32 | int64](n uint64, size B) int64 {
	if size > 0 && n > math.MaxInt64/2/uint64(size) {
		return math.MaxInt64 / 2
	}
	return int64(n) * int64(size)
}

func availableMemory() (int64, bool) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, false
	}
	kib, ok := field(data, "MemAvailable:")
	return kib << 10, ok
}

// groupRoom is the least that a level of the process's memory cgroup, of either version, leaves; file cache that the kernel can take back counts as left. What can't be read is no limit.
func groupRoom(self, root string) int64 {
	room := int64(math.MaxInt64)
	data, err := os.ReadFile(self)
	if err != nil {
		return room
	}
	for line := range strings.Lines(string(data)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		base, limit, usage, cache := root, "memory.max", "memory.current", []string{"inactive_file", "active_file"}
		switch {
		case strings.Contains(","+f[1]+",", ",memory,"):
			base, limit, usage, cache = filepath.Join(root, "memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", []string{"total_inactive_file", "total_active_file"}
		case f[0] != "0":
			continue
		}
		for p := filepath.Clean("/" + f[2]); ; p = filepath.Dir(p) {
			dir := filepath.Join(base, p)
			most, ok := number(filepath.Join(dir, limit))
			used, ok2 := number(filepath.Join(dir, usage))
			if ok && ok2 && most < 1<<50 {
				if stat, err := os.ReadFile(filepath.Join(dir, "memory.stat")); err == nil {
					for _, name := range cache {
						n, _ := field(stat, name)
						used -= n
					}
				}
				room = min(room, max(most-used, 0))
			}
			if p == "/" {
				break
			}
		}
	}
	return room
}

func number(path string) (int64, bool) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(string(bytes.TrimSpace(data)), 10, 64)
	return n, err == nil // "max" is no number
}

// field finds the number behind a name at the start of a line.
func field(data []byte, name string) (int64, bool) {
	for line := range bytes.Lines(data) {
		if f := bytes.Fields(line); len(f) >= 2 && string(f[0]) == name {
			n, err := strconv.ParseInt(string(f[1]), 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}
