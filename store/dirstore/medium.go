//go:build linux

package dirstore

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
)

// medium is what the file system below the directory is and can do.
type medium struct {
	kind  int64
	name  string
	tmpfs bool
	maps  bool // private mappings of locked files are known to behave
	// keepFD says that a mapping does not keep the lock of the descriptor it was made from, as on overlay, whose mappings belong to the file below.
	keepFD bool
	// ahead says that the file of a put gets its blocks before it is written, so that the write finds no full disk and one run of blocks. On tmpfs that would
	// only be another visit to every page.
	ahead bool
	total int64
}

var mappable = map[int64]string{unix.TMPFS_MAGIC: "tmpfs", unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs", unix.BTRFS_SUPER_MAGIC: "btrfs", unix.OVERLAYFS_SUPER_MAGIC: "overlay"}

// network lists file systems that may be shared with other hosts. FUSE and the ways into a virtual machine's host are among them: what is behind them can't be told.
var network = map[int64]string{
	unix.NFS_SUPER_MAGIC: "nfs", unix.SMB_SUPER_MAGIC: "smb", unix.CIFS_SUPER_MAGIC: "cifs", unix.SMB2_SUPER_MAGIC: "smb2", unix.CEPH_SUPER_MAGIC: "ceph",
	unix.AFS_SUPER_MAGIC: "afs", unix.AFS_FS_MAGIC: "afs", unix.CODA_SUPER_MAGIC: "coda", unix.NCP_SUPER_MAGIC: "ncp", unix.V9FS_MAGIC: "9p", unix.FUSE_SUPER_MAGIC: "fuse",
	unix.OCFS2_SUPER_MAGIC: "ocfs2", 0x01161970: "gfs2", 0x0bd00bd0: "lustre", 0x47504653: "gpfs", 0x19830326: "beegfs", 0xaad7aaea: "panfs", 0x61756673: "aufs", 0x786f4256: "vboxsf",
}

func (s *Store) inspectMedium() error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(s.dirfd, &st); err != nil {
		return sysError("open", s.dir, "statfs", err)
	}
	m := medium{kind: int64(uint32(st.Type)), total: blocks(st.Blocks, st.Bsize)}
	if s.hooks.fsType != 0 {
		m.kind = s.hooks.fsType
	}
	if name, ok := network[m.kind]; ok {
		return &sluice.Error{Kind: sluice.Unsupported, Op: "dirstore: open", Subject: s.dir, Detail: fmt.Sprintf("lies on %s, which other hosts may share; want tmpfs, ext4, xfs, btrfs or overlay", name),
			Hint: "run the service (sluice serve) next to a local directory and use its client"}
	}
	name, ok := mappable[m.kind]
	if !ok {
		name = fmt.Sprintf("%#x", m.kind)
	}
	m.name, m.tmpfs = name, m.kind == unix.TMPFS_MAGIC
	kept, err := s.probeLocks()
	if err != nil {
		return err
	}
	m.maps, m.keepFD, m.ahead = ok, !kept, !m.tmpfs
	s.medium = m
	if !ok {
		s.log.Warn("dirstore: samples are read instead of mapped, since nothing is known of mappings on this file system", "dir", s.dir, "type", name)
	}
	return nil
}

// probeLocks tries whether a mapping keeps the lock of a descriptor that was closed.
func (s *Store) probeLocks() (kept bool, err error) {
	name := newName()
	fd, err := unix.Openat(s.dirfd, name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return false, sysError("open", s.dir, "create a file", err)
	}
	defer func() { _ = unix.Unlinkat(s.dirfd, name, 0) }()
	other, err := unix.Openat(s.dirfd, name, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		_ = unix.Close(fd)
		return false, sysError("open", s.dir, "open a file", err)
	}
	defer func() { _ = unix.Close(other) }()
	if err := flock(fd, unix.LOCK_SH|unix.LOCK_NB); err != nil {
		_ = unix.Close(fd)
		return false, &sluice.Error{Kind: sluice.Unsupported, Op: "dirstore: open", Subject: s.dir, Detail: "the file system has no file locks", Err: err, Hint: "choose a directory on tmpfs, ext4, xfs, btrfs or overlay"}
	}
	mem, mapErr := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE)
	_ = unix.Close(fd)
	kept = mapErr == nil && errors.Is(flock(other, unix.LOCK_EX|unix.LOCK_NB), unix.EWOULDBLOCK)
	if mapErr == nil {
		_ = unix.Munmap(mem)
	}
	return kept, nil
}

func flock(fd, how int) error {
	for {
		if err := unix.Flock(fd, how); err != unix.EINTR {
			return err
		}
	}
}

func blocks[N int64 | uint64, B int64 | int32 | uint32](n N, size B) int64 {
	if f := float64(n) * float64(size); f > math.MaxInt64/2 {
		return math.MaxInt64 / 2
	}
	return int64(n) * int64(size)
}

// checkCaps refuses caps that the file system could never hold: in a container the 64 MB of /dev/shm are the usual case.
func (s *Store) checkCaps(caps sluice.Caps) error {
	total := s.medium.total
	if s.hooks.fsTotal != 0 {
		total = s.hooks.fsTotal
	}
	if caps.MaxBytes <= total {
		return nil
	}
	return &sluice.Error{Kind: sluice.NoSpace, Op: "dirstore: open", Subject: s.dir, Detail: fmt.Sprintf("the cap of %d bytes (%s) is more than the %s there can ever hold, which is %d bytes (%s)",
		caps.MaxBytes, human(caps.MaxBytes), s.medium.name, total, human(total)), Hint: s.moreRoom()}
}

// moreRoom says what to do about a file system that is too small.
func (s *Store) moreRoom() string {
	if s.medium.tmpfs {
		return "give it more memory (docker run --shm-size=16g or --ipc=host; mount -o remount,size=16G), lower max_bytes, or choose another directory"
	}
	return "lower max_bytes or choose a directory on a larger file system"
}

// room is how many more bytes the file system takes, and on tmpfs, whose files are memory, the cgroup. fresh asks for a reading of the cgroup that
// was made now. It is called under the ledger's lock.
func (s *Store) room(fresh bool) (free int64, of string) {
	if s.hooks.room != nil {
		return s.hooks.room(), "file system"
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(s.dirfd, &st); err != nil {
		return math.MaxInt64, "file system" // the write will tell
	}
	free, of = blocks(st.Bavail, st.Bsize), "file system"
	if s.medium.tmpfs && len(s.cgroups) > 0 {
		if n := s.groupRoom(fresh); n < free {
			free, of = n, "memory cgroup"
		}
	}
	return free, of
}

// groupReading is what the memory cgroups had left when they were asked.
type groupReading struct {
	at   time.Time
	free int64
	held int64 // what the store held then
}

// groupRoom is what the memory cgroups leave. Asking them takes ten times as long as the rest of a reservation, so an answer serves for a second, or until a
// quarter of it was used, less what all sessions have put since.
func (s *Store) groupRoom(fresh bool) int64 {
	h := s.led.health(s.caps)
	held := h.ResidentBytes + h.StagingBytes + h.PoolBytes
	if r := &s.reading; fresh || r.at.IsZero() || time.Since(r.at) > time.Second || held-r.held > r.free/4 {
		*r = groupReading{at: time.Now(), free: math.MaxInt64 / 2, held: held}
		for _, g := range s.cgroups {
			if n, ok := g.free(); ok {
				r.free = min(r.free, n)
			}
		}
	}
	return s.reading.free - (held - s.reading.held)
}

// cgroup is a level of the process's memory cgroup that has a limit.
type cgroup struct {
	dir          string
	limit, usage string
	cache        [2]string // the lines of memory.stat that the kernel can take back
}

// cgroups lists the levels with a limit, in either version of the interface; what can't be read is no limit.
func cgroups() (limited []cgroup) {
	data, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(data)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		root, g := "/sys/fs/cgroup", cgroup{limit: "memory.max", usage: "memory.current", cache: [2]string{"inactive_file", "active_file"}}
		switch {
		case strings.Contains(","+f[1]+",", ",memory,"):
			root, g = root+"/memory", cgroup{limit: "memory.limit_in_bytes", usage: "memory.usage_in_bytes", cache: [2]string{"total_inactive_file", "total_active_file"}}
		case f[0] != "0":
			continue
		}
		for p := filepath.Clean("/" + f[2]); ; p = filepath.Dir(p) {
			g.dir = filepath.Join(root, p)
			if n, ok := readNumber(filepath.Join(g.dir, g.limit)); ok && n < 1<<50 {
				limited = append(limited, g)
			}
			if p == "/" {
				break
			}
		}
	}
	return limited
}

func (g *cgroup) free() (int64, bool) {
	limit, ok := readNumber(filepath.Join(g.dir, g.limit))
	used, ok2 := readNumber(filepath.Join(g.dir, g.usage))
	if !ok || !ok2 {
		return 0, false
	}
	stat, _ := os.ReadFile(filepath.Join(g.dir, "memory.stat"))
	for line := range bytes.Lines(stat) {
		for _, c := range g.cache {
			if rest, ok := bytes.CutPrefix(line, []byte(c+" ")); ok {
				n, _ := strconv.ParseInt(string(bytes.TrimSpace(rest)), 10, 64)
				used -= n
			}
		}
	}
	return max(limit-used, 0), true
}

func readNumber(path string) (int64, bool) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(string(bytes.TrimSpace(data)), 10, 64)
	return n, err == nil // "max" is no number
}

// human gives a size in a unit that people read.
func human(n int64) string {
	switch f := float64(n); {
	case n >= 1<<40:
		return fmt.Sprintf("%.1f TiB", f/(1<<40))
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", f/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", f/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%.1f KiB", f/(1<<10))
	}
	return fmt.Sprintf("%d B", n)
}
