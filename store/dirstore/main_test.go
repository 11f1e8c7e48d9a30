//go:build linux

package dirstore

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if role := os.Getenv("DIRSTORE_ROLE"); role != "" {
		helper(role) // this process is the victim of a test in another one
		return
	}
	goleak.VerifyTestMain(m)
}
