// Package access decides who may call the service: tokens and their roles, the unix socket's peers, host names, cookies.
package access

import (
	"context"
	"fmt"

	"github.com/sluice-ml/sluice"
)

// Role is what a caller may do.
type Role string

// The roles. An operator may do everything.
const (
	Producer Role = "producer" // reserve, upload, stage, commit, report
	Consumer Role = "consumer" // acquire, read, settle, renew
	Operator Role = "operator" // create, close, reshape and delete runs, dead letters, and what the others may
)

// Caller is who made a call, as far as the door has found out.
type Caller struct {
	Name string // of the token, or "uid 1000" on the unix socket
	Role Role
	Run  string // the one run that the token is good for, or "" for all
	UID  int    // of the peer on the unix socket, -1 over TCP
}

// May says whether the caller may act in one of the roles on the run; run is "" for what concerns no single run. Any role may look.
func (c Caller) May(run string, roles ...Role) error {
	if c.Run != "" && run != c.Run {
		return &sluice.Error{Kind: sluice.Denied, Op: "access", Subject: run, Detail: fmt.Sprintf("the token %q is good for the run %q only", c.Name, c.Run)}
	}
	if c.Role == Operator || len(roles) == 0 {
		return nil
	}
	for _, r := range roles {
		if c.Role == r {
			return nil
		}
	}
	return &sluice.Error{Kind: sluice.Denied, Op: "access", Subject: run, Detail: fmt.Sprintf("the token %q has the role %s, want %s", c.Name, c.Role, list(roles))}
}

func list(roles []Role) string {
	s := ""
	for _, r := range roles {
		if r != Operator {
			s += string(r) + " or "
		}
	}
	return s + string(Operator)
}

type callerKey struct{}

// WithCaller notes who calls.
func WithCaller(ctx context.Context, c Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// CallerOf is who calls; nobody, who may do nothing, if the door did not say.
func CallerOf(ctx context.Context) Caller {
	c, ok := ctx.Value(callerKey{}).(Caller)
	if !ok {
		return Caller{Name: "nobody", Role: "none", Run: "(none)", UID: -1}
	}
	return c
}
