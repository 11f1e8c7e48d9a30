package safetensors

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"

	"github.com/sluice-ml/sluice"
)

// refused makes an error of the given kind; corrupt and invalid are short for the two that are frequent.
func refused(kind sluice.Kind, op, subject, format string, args ...any) error {
	return &sluice.Error{Kind: kind, Op: "safetensors: " + op, Subject: subject, Detail: fmt.Sprintf(format, args...)}
}

func corrupt(op, subject, format string, args ...any) error {
	return refused(sluice.Corrupt, op, subject, format, args...)
}

func invalid(op, subject, format string, args ...any) error {
	return refused(sluice.Invalid, op, subject, format, args...)
}

// failed wraps a failure of the medium. What is already one of our errors keeps its kind: a reader may fetch its bytes
// from a store.
func failed(op, subject, detail string, err error) error {
	e := &sluice.Error{Kind: sluice.KindOf(err), Op: "safetensors: " + op, Subject: subject, Detail: detail, Err: err}
	if e.Kind != "" {
		return e
	}
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT), errors.Is(err, syscall.EFBIG), errors.Is(err, syscall.ENOMEM):
		e.Kind = sluice.NoSpace
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		e.Kind = sluice.Denied
	case errors.Is(err, os.ErrClosed):
		e.Kind = sluice.Closed
	case errors.Is(err, syscall.EBADF):
		e.Kind = sluice.Invalid // opened for the other direction
	default:
		e.Kind = sluice.Unavailable
	}
	return e
}

// notOpen is for the descriptor of a file that was closed, which is the one reason not to get it.
func notOpen(op, name string, err error) error {
	return &sluice.Error{Kind: sluice.Closed, Op: "safetensors: " + op, Subject: name, Detail: "is not open", Err: err}
}

// detail is the message of an error of the domain without its operation.
func detail(err error) string {
	var e *sluice.Error
	if errors.As(err, &e) && e.Detail != "" {
		return e.Detail
	}
	return err.Error()
}

// clip bounds the text from a file that goes into a message.
func clip(s string) string {
	if len(s) <= 60 {
		return s
	}
	return strings.ToValidUTF8(s[:60], "") + "..."
}

func shapeText(shape []int64) string { return strings.ReplaceAll(fmt.Sprint(shape), " ", ",") }
