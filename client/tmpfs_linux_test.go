package client

import "golang.org/x/sys/unix"

// onTmpfs reports whether dir is in memory, or not there.
func onTmpfs(dir string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(dir, &fs) != nil || fs.Type == unix.TMPFS_MAGIC
}
