//go:build !linux

package inspect

const noAccessTime = 0
