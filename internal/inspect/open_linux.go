package inspect

import "golang.org/x/sys/unix"

const noAccessTime = unix.O_NOATIME
