package service

import "golang.org/x/sys/unix"

// roomOf is how much is free where dir lies, and whether that is memory.
func roomOf(dir string) (free int64, inRAM bool, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, false, err
	}
	return int64(st.Bavail) * st.Bsize, st.Type == unix.TMPFS_MAGIC, nil
}
