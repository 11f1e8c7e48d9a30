package access

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/netip"
	"strings"

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

func (g *guard) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	d := g.d
	c, ok := r.Context().Value(connKey{}).(*conn)
	if !ok {
		panic("access: a call that came through no connection of the door")
	}
	protect(w.Header(), strings.HasPrefix(r.URL.Path, "/v1/"))
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
		g.pass(w, r, d.calls)
		return
	case "/login":
		g.login(w, r, c)
		return
	case "/logout":
		g.logout(w, r)
		return
	}
	caller, problem := d.identify(r, c)
	if problem != nil {
		if problem.Status == http.StatusUnauthorized && r.URL.Path == "/" && strings.Contains(r.Header.Get("Accept"), "text/html") {
			http.Redirect(w, r, "/login", http.StatusSeeOther)
			return
		}
		g.refuse(w, r, problem)
		return
	}
	ctx := WithCaller(r.Context(), caller)
	room := d.calls
	if kind := kindOfCall(r); kind != short {
		var cancel context.CancelFunc
		ctx, cancel = context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(g.stopping, cancel)()
		room = d.waiting
		if kind == holds {
			room = d.held
		}
	}
	g.pass(w, r.WithContext(ctx), room)
}

// identify finds out who calls. A token that is given counts, also on the socket; then comes the peer's uid, or the cookie of the dashboard.
func (d *Door) identify(r *http.Request, c *conn) (Caller, *wire.Problem) {
	token, given := bearer(r.Header.Values("Authorization"))
	switch {
	case given:
		caller, _, err := d.keys.caller(token)
		if err != nil {
			return Caller{}, d.unauthorized(r, c, err)
		}
		caller.UID = c.uid
		return caller, nil
	case c.unix && c.uid >= 0 && (c.uid == d.self || c.uid == 0):
		return Caller{Name: uidName(c.uid), Role: Operator, UID: c.uid}, nil
	case c.unix:
		return Caller{}, &wire.Problem{Status: http.StatusForbidden, Code: string(sluice.Denied), Title: "Denied", Detail: "the socket is for the user that runs the service"}
	}
	cookie, err := r.Cookie(d.cookieName())
	if err != nil {
		return Caller{}, noToken("the call has no token")
	}
	caller, err := d.logins.caller(cookie.Value, d.keys)
	switch {
	case errors.Is(err, sluice.ErrUnavailable):
		return Caller{}, wire.ProblemOf(err)
	case err != nil: // no failed try: a page that is left open over a restart of the service goes on asking
		return Caller{}, noToken("the login has ended")
	}
	if !safe(r.Method) && !fromOwnPage(r) {
		return Caller{}, &wire.Problem{Status: http.StatusForbidden, Code: string(sluice.Denied), Title: "Denied", Detail: "the call does not show that it comes from the dashboard's own page", Hint: "programs call with a token"}
	}
	return caller, nil
}

func safe(method string) bool { return method == http.MethodGet || method == http.MethodHead }

// fromOwnPage wants a browser's word for it. That no other page's call comes this far was seen to before; this refuses what says nothing of where it comes from.
func fromOwnPage(r *http.Request) bool {
	return r.Header.Get("Sec-Fetch-Site") == "same-origin" || r.Header.Get("Sec-Fetch-Site") == "" && r.Header.Get("Origin") != ""
}

func noToken(detail string) *wire.Problem {
	return &wire.Problem{Status: http.StatusUnauthorized, Code: wire.CodeUnauthorized, Title: "No valid token", Detail: detail, Hint: "send Authorization: Bearer and a token from the service's state directory, see `sluice token`"}
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
	short callKind = iota
	waits          // may wait for something to happen
	holds          // is open as long as its client lives
)

func kindOfCall(r *http.Request) callKind {
	p := r.URL.Path
	switch {
	case strings.HasSuffix(p, "/acquire"), strings.HasSuffix(p, "/reserve"):
		return waits
	case strings.HasSuffix(p, "/events"), strings.HasPrefix(p, "/v1/sessions/") && r.Method == http.MethodGet:
		return holds
	}
	return short
}

// pass hands the call on if there is room.
func (g *guard) pass(w http.ResponseWriter, r *http.Request, room chan struct{}) {
	select {
	case room <- struct{}{}:
		defer func() { <-room }()
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
