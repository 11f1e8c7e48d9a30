package service

import (
	"context"
	"net/http"
	"slices"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/service/access"
)

// runCalls are the calls that make, describe, change and end runs.
func (s *Service) runCalls(a *api) {
	handle(a, operation{method: http.MethodGet, path: "/v1/status", id: "status", across: true, tag: "service", summary: "The service and all its runs"},
		func(ctx context.Context, c *call, _ *nothing) (*wire.ServiceStatus, error) {
			st := s.statusFor(ctx, c)
			return &st, nil
		})
	handle(a, operation{method: http.MethodPost, path: "/v1/check", id: "check-ref", tag: "service", summary: "Hold a ref against a schema", roles: both, across: true, hot: true,
		text: "`schema` says in what the ref is not what the schema promises. It is about no run, and the sample need not be there: a producer may ask before a put, a consumer of a mixed run before it trains."},
		func(_ context.Context, _ *call, in *wire.Judge) (*nothing, error) {
			schema, err := in.Against()
			if err != nil {
				return nil, err
			}
			return nil, schema.Validate(in.Ref)
		})
	handle(a, operation{method: http.MethodPost, path: "/v1/runs", id: "create-run", tag: "runs", summary: "Create a run", roles: operators, across: true,
		text: "Creating a run again with an equal spec is success; with another it is `conflict`, which names the field. The caps of all runs may add up to the service's at most: `full` says by how much they do not."},
		func(ctx context.Context, c *call, in *wire.RunSpec) (*wire.Run, error) {
			if err := c.caller.May(in.RunID, operators...); err != nil {
				return nil, err
			}
			r, _, err := s.create(ctx, in)
			if err != nil {
				return nil, err
			}
			d := r.describe(ctx)
			return &d, nil
		})
	handle(a, operation{method: http.MethodGet, path: "/v1/runs", id: "list-runs", across: true, tag: "runs", summary: "List the runs", text: "Those that the caller's token is good for."},
		func(ctx context.Context, c *call, _ *nothing) (*wire.RunList, error) {
			l := wire.RunList{Runs: []wire.Run{}}
			for _, r := range s.list() {
				if c.caller.May(r.id) != nil {
					continue
				}
				l.Runs = append(l.Runs, r.describe(ctx))
			}
			return &l, nil
		})
	handle(a, operation{method: http.MethodGet, path: "/v1/runs/{run}", id: "describe-run", tag: "runs", summary: "Describe a run"},
		func(ctx context.Context, c *call, _ *nothing) (*wire.Run, error) {
			d := c.run.describe(ctx)
			return &d, nil
		})
	handle(a, operation{method: http.MethodGet, path: "/v1/runs/{run}/status", id: "run-status", tag: "runs", summary: "Counters, holders and who waits for whom", hot: true},
		func(ctx context.Context, c *call, _ *nothing) (*wire.Status, error) {
			st, err := c.run.status(ctx)
			return &st, err
		})
	handle(a, operation{method: http.MethodDelete, path: "/v1/runs/{run}", id: "delete-run", tag: "runs", summary: "Delete a run and all that is in it", roles: operators, early: true,
		text: "Whoever waits on it is told that it is gone. Deleting what is not there is success."},
		func(ctx context.Context, c *call, _ *nothing) (*nothing, error) {
			return nil, s.Delete(ctx, c.r.PathValue("run"))
		})
	handle(a, operation{method: http.MethodPost, path: "/v1/runs/{run}/close", id: "close-run", tag: "runs", summary: "End the puts of a run", roles: operators,
		text: "What is pending drains, and then the consumers are told the end, with the cause if there is one. The first call counts."},
		func(ctx context.Context, c *call, in *wire.CloseRun) (*nothing, error) {
			var cause error
			if in.Cause != "" {
				cause = &sluice.Error{Kind: sluice.TargetFault, Detail: in.Cause}
			}
			return nil, c.run.q.Close(ctx, cause)
		})
	handle(a, operation{method: http.MethodPost, path: "/v1/runs/{run}/reshape", id: "reshape-run", tag: "runs", summary: "Change the number of ranks and of samples a rank and step", roles: operators,
		text: "`conflict` while a lease is out."},
		func(ctx context.Context, c *call, in *wire.Reshape) (*nothing, error) {
			return nil, s.change(ctx, c.run, func(spec *wire.RunSpec) error {
				if err := c.run.q.Reshape(ctx, in.Ranks, in.PerRank); err != nil {
					return err
				}
				w := wire.Windows{Ranks: in.Ranks, PerRank: in.PerRank}
				if spec.Windows != nil {
					w.Prefetch, w.DropTail = spec.Windows.Prefetch, spec.Windows.DropTail
				}
				spec.Windows = &w
				return nil
			})
		})
	handle(a, operation{method: http.MethodPost, path: "/v1/runs/{run}/configure", id: "configure-run", tag: "runs", summary: "Change the lease time and the marks of a run, and reopen it", roles: operators,
		text: "All that is given or nothing; the rest stays, and so do the deadlines of leases that are out. `invalid` names the field that does not fit. `conflict` names `reopen` where a closed run has samples pending or leased yet, or has windows."},
		func(ctx context.Context, c *call, in *wire.Configure) (*wire.Run, error) {
			err := s.change(ctx, c.run, func(spec *wire.RunSpec) error {
				if err := c.run.q.Configure(ctx, in.Change()); err != nil {
					return err
				}
				if in.VisibilityTimeoutSeconds != nil {
					spec.VisibilityTimeoutSeconds = *in.VisibilityTimeoutSeconds
				}
				spec.Caps = wire.Caps(c.run.q.Health().Caps)
				return nil
			})
			if err != nil {
				return nil, err
			}
			d := c.run.describe(ctx)
			return &d, nil
		})
	handle(a, operation{method: http.MethodPost, path: "/v1/runs/{run}/versions", id: "set-versions", tag: "runs", summary: "Set the version gates", roles: operators,
		text: "Which target versions are let in (any, if left out) and the least draft version (any, if left out)."},
		func(ctx context.Context, c *call, in *wire.Versions) (*nothing, error) {
			return nil, s.change(ctx, c.run, func(spec *wire.RunSpec) error {
				if err := c.run.q.SetVersions(ctx, in.TargetVersions, in.MinDraftVersion); err != nil {
					return err
				}
				spec.TargetVersions, spec.MinDraftVersion = in.TargetVersions, in.MinDraftVersion
				return nil
			})
		})
	s.deadLetterCalls(a)
}

// statusFor is the service's status, with those of the runs that the caller may see.
func (s *Service) statusFor(ctx context.Context, c *call) wire.ServiceStatus {
	st := s.Status(ctx)
	st.Runs = slices.DeleteFunc(st.Runs, func(r wire.Status) bool { return c.caller.May(r.RunID) != nil })
	return st
}

func (s *Service) deadLetterCalls(a *api) {
	handle(a, operation{method: http.MethodGet, path: "/v1/runs/{run}/dead-letters", id: "list-dead-letters", tag: "dead letters", summary: "List the dead letters, oldest first"},
		func(ctx context.Context, c *call, _ *nothing) (*wire.DeadLetters, error) {
			list, err := c.run.q.DeadLetters(ctx)
			if err != nil {
				return nil, err
			}
			w := wire.DeadLetters{DeadLetters: make([]wire.DeadLetter, 0, len(list))}
			for _, d := range list {
				if d.Reasons == nil {
					d.Reasons = []string{}
				}
				w.DeadLetters = append(w.DeadLetters, wire.DeadLetter(d))
			}
			return &w, nil
		})
	for _, o := range []struct {
		path, summary, text string
		do                  func(*run, context.Context, ...string) (int, error)
	}{
		{"requeue", "Give dead letters new budgets and another try", "They go behind all others. One whose bytes were freed can't be requeued and is passed over.",
			func(r *run, ctx context.Context, ids ...string) (int, error) { return r.q.Requeue(ctx, ids...) }},
		{"drop", "Drop dead letters and free their bytes", "",
			func(r *run, ctx context.Context, ids ...string) (int, error) { return r.q.Drop(ctx, ids...) }},
	} {
		handle(a, operation{method: http.MethodPost, path: "/v1/runs/{run}/dead-letters/" + o.path, id: o.path + "-dead-letters", tag: "dead letters", summary: o.summary, text: o.text, roles: operators},
			func(ctx context.Context, c *call, in *wire.SampleIDs) (*wire.Found, error) {
				ids := in.SampleIDs
				if in.All {
					list, err := c.run.q.DeadLetters(ctx)
					if err != nil {
						return nil, err
					}
					for i := range list {
						ids = append(ids, list[i].Ref.SampleID())
					}
				}
				n, err := o.do(c.run, ctx, ids...)
				return &wire.Found{Found: n}, err
			})
	}
}

var (
	operators = []access.Role{access.Operator}
	producers = []access.Role{access.Producer}
	consumers = []access.Role{access.Consumer}
	both      = []access.Role{access.Producer, access.Consumer}
)
