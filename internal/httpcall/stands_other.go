//go:build !unix

package httpcall

import "net"

// stands can't tell here: the call will.
func stands(net.Conn) bool { return true }
