package access

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

// guard lets a call through to the service, or answers it.
type guard struct {
	d        *Door
	next     http.Handler
	stopping context.Context
}

var (
	noStore      = []string{"no-store"}
	noSniff      = []string{"nosniff"}
	noFrames     = []string{"DENY"}
	sameOrigin   = []string{"same-origin"}
	policyOfAPI  = []string{"default-src 'none'; frame-ancestors 'none'"}
	policyOfPage = []string{"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"}
)

// protect sets the headers that tell a browser what it must not do. There is no Strict-Transport-Security: it would hold for every port of the host.
func protect(h http.Header, api bool) {
	h["Cache-Control"] = noStore // a handler may know better
	h["X-Content-Type-Options"] = noSniff
	if api {
		h["Content-Security-Policy"] = policyOfAPI
		return
	}
	h["Content-Security-Policy"] = policyOfPage
	h["X-Frame-Options"] = noFrames
	h["Referrer-Policy"] = sameOrigin
	h["Cross-Origin-Opener-Policy"] = sameOrigin
	h["Cross-Origin-Resource-Policy"] = sameOrigin
}

func isAPI(r *http.Request) bool { return strings.HasPrefix(r.URL.Path, "/v1/") }

func (g *guard) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	d := g.d
	c, ok := r.Context().Value(connKey{}).(*conn)
	if !ok {
		panic("access: a call that came through no connection of the door")
	}
	// Forms can set no such header, so nothing that could be shown answers one. Of what is let in it is a token: refuse makes up for the others.
	if api := isAPI(r); !api || r.Method != http.MethodPost || r.Header["Authorization"] == nil {
		protect(w.Header(), api)
	}
	if !c.unix { // no browser reaches the socket
		if !d.hostAllowed(r, c) {
			g.refuse(w, r, &wire.Problem{Status: http.StatusForbidden, Code: string(sluice.Denied), Title: "Denied", Detail: "the service is not called by this name", Hint: "call it by its address, or start it with --allow-host and the name"})
			return
		}
		if err := d.origins.Check(r); err != nil {
			g.refuse(w, r, &wire.Problem{Status: http.StatusForbidden, Code: string(sluice.Denied), Title: "Denied", Detail: "the call comes from a page of another site"})
			return
		}
	}
	switch r.URL.Path {
	case "/healthz", "/readyz": // they say nothing but yes or no
		g.pass(w, r, &place{room: d.calls})
		return
	case "/login":
		g.login(w, r, c)
		return
	case "/logout":
		g.logout(w, r)
		return
	}
	caller, known, problem := d.identify(r, c)
	if problem != nil {
		if problem.Status == http.StatusUnauthorized && r.URL.Path == "/" && strings.Contains(r.Header.Get("Accept"), "text/html") {
			http.Redirect(w, r, "/login", http.StatusSeeOther)
			return
		}
		g.refuse(w, r, problem)
		return
	}
	ctx := WithCaller(r.Context(), caller)
	p := &place{room: d.calls, g: g}
	switch kind := kindOfCall(r); kind {
	case short:
	case mayWait:
		ctx = context.WithValue(ctx, placeKey{}, p)
	case moves:
		p.room = d.moving
	case waits, holds:
		var end func()
		ctx, end = g.untilStop(ctx)
		defer end()
		p.room = d.waiting
		if kind == holds {
			p.room = d.held
			if known != nil {
				var cancel context.CancelFunc
				ctx, cancel = context.WithCancel(ctx)
				defer cancel()
				go whileKnown(ctx, cancel, known)
			}
		}
	}
	g.pass(w, r.WithContext(ctx), p)
}

// untilStop is ctx until the service stops.
func (g *guard) untilStop(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(g.stopping, cancel)
	return ctx, func() { stop(); cancel() }
}

// whileKnown ends a call that is open for long when its caller is not let in any more.
func whileKnown(ctx context.Context, cancel context.CancelFunc, known func() bool) {
	tick := time.NewTicker(recheck)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if !known() {
				cancel()
				return
			}
		}
	}
}

// place is the room that a call takes.
type place struct {
	room chan struct{}
	g    *guard
}

type placeKey struct{}

// Wait is for a call that turns out to wait: from then on it counts among those that do, and not among the short ones, which it must not keep out. The context that it returns ends when the
// service stops; call end when the wait is over. It is false if there is no room to wait.
func Wait(ctx context.Context) (_ context.Context, end func(), ok bool) {
	p, _ := ctx.Value(placeKey{}).(*place)
	if p == nil {
		return ctx, func() {}, true // it counts as one that waits already, or came through no door
	}
	select {
	case p.g.d.waiting <- struct{}{}:
	default:
		return ctx, func() {}, false
	}
	<-p.room
	p.room = p.g.d.waiting
	ctx, end = p.g.untilStop(ctx)
	return ctx, end, true
}

// identify finds out who calls, and how to ask whether that still holds; nil if it always does. A token that is given counts, also on the socket; then comes the peer's uid, or the cookie of the
// dashboard.
func (d *Door) identify(r *http.Request, c *conn) (_ Caller, known func() bool, _ *wire.Problem) {
	same := func(was, is Caller, err error) bool { // a file that can't be read now ends nothing that is open
		return errors.Is(err, sluice.ErrUnavailable) || err == nil && is == was
	}
	token, given := bearer(r.Header.Values("Authorization"))
	switch {
	case given:
		caller, key, err := d.keys.caller(token)
		if err != nil {
			return Caller{}, nil, d.unauthorized(r, c, err)
		}
		was := caller
		caller.UID = c.uid
		return caller, func() bool { is, err := d.keys.owner(key); return same(was, is, err) }, nil
	case c.unix && c.uid >= 0 && (c.uid == d.self || c.uid == 0):
		return Caller{Name: uidName(c.uid), Role: Operator, UID: c.uid}, nil, nil
	case c.unix:
		return Caller{}, nil, &wire.Problem{Status: http.StatusForbidden, Code: string(sluice.Denied), Title: "Denied", Detail: "the socket is for the user that runs the service"}
	}
	cookie, err := r.Cookie(d.cookieName())
	if err != nil {
		return Caller{}, nil, noToken("the call has no token")
	}
	caller, err := d.logins.caller(cookie.Value, d.keys)
	switch {
	case errors.Is(err, sluice.ErrUnavailable):
		return Caller{}, nil, wire.ProblemOf(err)
	case err != nil: // no failed try: a page that is left open over a restart of the service goes on asking
		return Caller{}, nil, noToken("the login has ended")
	}
	if !safe(r.Method) && !fromOwnPage(r) {
		return Caller{}, nil, &wire.Problem{Status: http.StatusForbidden, Code: string(sluice.Denied), Title: "Denied", Detail: "the call does not show that it comes from the dashboard's own page", Hint: "programs call with a token"}
	}
	return caller, func() bool { is, err := d.logins.caller(cookie.Value, d.keys); return same(caller, is, err) }, nil
}

func safe(method string) bool { return method == http.MethodGet || method == http.MethodHead }

// fromOwnPage wants a browser's word for it. That no other page's call comes this far was seen to before; this refuses what says nothing of where it comes from.
func fromOwnPage(r *http.Request) bool {
	return r.Header.Get("Sec-Fetch-Site") == "same-origin" || r.Header.Get("Sec-Fetch-Site") == "" && r.Header.Get("Origin") != ""
}

func noToken(detail string) *wire.Problem {
	return &wire.Problem{Status: http.StatusUnauthorized, Code: wire.CodeUnauthorized, Title: "No valid token", Detail: detail, Hint: wire.HintToken}
}

// unauthorized counts a try with a wrong token, and answers it. Who has failed often is told to wait, which keeps the log short and guesses slow; a right token is heard nevertheless, or
// anyone on the host could lock everyone out.
func (d *Door) unauthorized(r *http.Request, c *conn, err error) *wire.Problem {
	if errors.Is(err, sluice.ErrUnavailable) {
		return wire.ProblemOf(err)
	}
	from := origin(r, c)
	if !d.failures.allow(from) {
		return &wire.Problem{Status: http.StatusTooManyRequests, Code: wire.CodeBusy, Title: "Too many failed tries", Detail: "too many calls from this address had a wrong token", Hint: "wait a minute"}
	}
	d.o.Log.Warn("a call had a wrong token", "from", from, "method", r.Method, "path", r.URL.Path)
	return noToken("the token is not known")
}

// bearer takes the token out of the Authorization headers. What is given and is none comes back as a token that nobody has.
func bearer(headers []string) (token string, given bool) {
	if len(headers) == 0 {
		return "", false
	}
	scheme, token, _ := strings.Cut(headers[0], " ")
	token = strings.Trim(token, " ")
	if len(headers) > 1 || !strings.EqualFold(scheme, "Bearer") || !wire.ValidTokenValue(token) {
		return "", true
	}
	return token, true
}

// origin names where a call comes from, for counting: IPv6 by its network, since a host there has many addresses.
func origin(r *http.Request, c *conn) string {
	if c.unix {
		return uidName(c.uid)
	}
	a, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return "unknown"
	}
	ip := a.Addr().Unmap()
	if ip.Is6() {
		if p, err := ip.WithZone("").Prefix(64); err == nil {
			return p.String()
		}
	}
	return ip.String()
}

type callKind int

const (
	short   callKind = iota
	mayWait          // short, or one that says of itself that it waits
	moves            // brings or takes a sample's bytes: as long as its client's network is slow
	waits            // may wait for something to happen
	holds            // is open as long as its client lives
)

func kindOfCall(r *http.Request) callKind {
	p := r.URL.Path
	switch {
	case strings.Contains(p, "/samples/"):
		return moves
	case strings.HasSuffix(p, "/commit"), strings.HasSuffix(p, "/abort"):
		return mayWait
	case strings.HasSuffix(p, "/acquire"), strings.HasSuffix(p, "/reserve"):
		return waits
	case strings.HasSuffix(p, "/events"), strings.HasPrefix(p, "/v1/sessions/") && safe(r.Method):
		return holds
	}
	return short
}

// pass hands the call on if there is room.
func (g *guard) pass(w http.ResponseWriter, r *http.Request, p *place) {
	select {
	case p.room <- struct{}{}:
		defer func() { <-p.room }()
	default:
		w.Header().Set("Retry-After", "1")
		g.refuse(w, r, &wire.Problem{Status: http.StatusTooManyRequests, Code: wire.CodeBusy, Title: "Busy", Detail: "the service has as many calls of this kind under way as it takes", Hint: "try again"})
		return
	}
	if r.Method != http.MethodPut { // which brings a sample's file; its size is the reservation's matter
		if r.ContentLength > wire.MaxBody {
			g.refuse(w, r, &wire.Problem{Status: http.StatusRequestEntityTooLarge, Code: wire.CodeTooLarge, Title: "Too large", Detail: "the body has more than 8 MiB"})
			return
		}
		if r.Body != http.NoBody {
			r.Body = http.MaxBytesReader(w, r.Body, wire.MaxBody)
		}
	}
	out := paced(w, r, g.d.o.Limits.StallTime)
	g.next.ServeHTTP(out, r)
	out.p.setWrite(false) // for what is still buffered
}

// refuse answers a call that goes no further. Its connection ends with it: who is not let in holds none, and a body that nobody reads need not come.
func (g *guard) refuse(w http.ResponseWriter, r *http.Request, p *wire.Problem) {
	body, err := json.Marshal(p)
	if err != nil {
		panic(err) // a problem is strings and a number
	}
	h := w.Header()
	protect(h, isAPI(r))
	h.Set("Content-Type", wire.ProblemType)
	h.Set("Connection", "close")
	if p.Status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", `Bearer realm="sluice"`)
	}
	if p.Status == http.StatusTooManyRequests && h.Get("Retry-After") == "" {
		h.Set("Retry-After", "60")
	}
	w.WriteHeader(p.Status)
	if r.Method != http.MethodHead {
		_, _ = w.Write(append(body, '\n')) // the caller may be gone
	}
}
