package access

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"html/template"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

const (
	loginLife = 12 * time.Hour
	maxLogins = 1024 // the oldest goes
	maxForm   = 4 << 10
)

// logins are the browsers that have shown a token. They are kept in memory, by the digest of the cookie; a restart ends them.
type logins struct {
	mu   sync.Mutex
	open map[digest]login
}

// login remembers which token it was made with, and ends with it.
type login struct {
	token   digest
	expires time.Time
}

// add returns the value of the cookie.
func (l *logins) add(token digest) string {
	id := rand.Text() // 130 bits
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open == nil {
		l.open = map[digest]login{}
	}
	now := time.Now()
	var oldest digest
	for d, o := range l.open {
		if now.After(o.expires) {
			delete(l.open, d)
		} else if first, ok := l.open[oldest]; !ok || o.expires.Before(first.expires) {
			oldest = d
		}
	}
	if len(l.open) >= maxLogins {
		delete(l.open, oldest)
	}
	l.open[sha256.Sum256([]byte(id))] = login{token, now.Add(loginLife)}
	return id
}

func (l *logins) remove(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.open, sha256.Sum256([]byte(id)))
}

// caller is who logged in. The look-up by a digest tells nothing of the id.
func (l *logins) caller(id string, keys *keyring) (Caller, error) {
	l.mu.Lock()
	o, ok := l.open[sha256.Sum256([]byte(id))]
	l.mu.Unlock()
	if !ok || time.Now().After(o.expires) {
		return Caller{}, errNoLogin
	}
	return keys.owner(o.token)
}

var errNoLogin = &sluice.Error{Kind: sluice.Denied, Op: "access", Detail: "the login has ended", Hint: "log in again"}

// cookieName has the port in it: browsers send a host's cookies to all of its ports, and two services on one host must not end each other's logins.
func (d *Door) cookieName() string { return "sluice-login-" + d.port() }

func (d *Door) cookie(value string, age time.Duration) *http.Cookie {
	return &http.Cookie{Name: d.cookieName(), Value: value, Path: "/", MaxAge: int(age / time.Second), HttpOnly: true, Secure: d.tls != nil, SameSite: http.SameSiteStrictMode}
}

func (g *guard) login(w http.ResponseWriter, r *http.Request, c *conn) {
	switch {
	case c.unix:
		http.Redirect(w, r, "/", http.StatusSeeOther)
	case safe(r.Method):
		loginPage(w, http.StatusOK, "")
	case r.Method != http.MethodPost:
		g.refuse(w, r, &wire.Problem{Status: http.StatusMethodNotAllowed, Code: wire.CodeMethod, Title: "Method not allowed", Detail: "want GET or POST"})
	default:
		g.tryLogin(w, r, c)
	}
}

func (g *guard) tryLogin(w http.ResponseWriter, r *http.Request, c *conn) {
	d := g.d
	r.Body = http.MaxBytesReader(w, r.Body, maxForm)
	paced(w, r, d.o.Limits.StallTime)
	if err := r.ParseForm(); err != nil {
		w.Header().Set("Connection", "close")
		loginPage(w, http.StatusBadRequest, "That was no login form.")
		return
	}
	_, key, err := d.keys.caller(strings.TrimSpace(r.PostForm.Get("token"))) // of the body alone, never of the URL
	if err != nil {
		p := d.unauthorized(r, c, err)
		w.Header().Set("Connection", "close")
		loginPage(w, p.Status, "Not let in: "+p.Detail+".")
		return
	}
	http.SetCookie(w, d.cookie(d.logins.add(key), loginLife))
	http.Redirect(w, r, "/", http.StatusSeeOther)
}

func (g *guard) logout(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		g.refuse(w, r, &wire.Problem{Status: http.StatusMethodNotAllowed, Code: wire.CodeMethod, Title: "Method not allowed", Detail: "want POST"})
		return
	}
	if g.d.tcp != nil {
		if cookie, err := r.Cookie(g.d.cookieName()); err == nil {
			g.d.logins.remove(cookie.Value)
		}
		http.SetCookie(w, g.d.cookie("", -time.Second))
	}
	http.Redirect(w, r, "/login", http.StatusSeeOther)
}

const loginStyle = `:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:26rem;margin:15vh auto;padding:0 1rem}input,button{font:inherit;box-sizing:border-box;width:100%;padding:.5rem;margin:.25rem 0 .75rem}code{font-size:.9em}`

var (
	loginStyleHash = sha256.Sum256([]byte(loginStyle))
	loginPolicy    = fmt.Sprintf("default-src 'none'; style-src 'sha256-%s'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'", base64.StdEncoding.EncodeToString(loginStyleHash[:]))
	loginTemplate  = template.Must(template.New("login").Parse(`<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Sluice: log in</title><style>` + loginStyle + `</style></head>
<body><h1>Sluice</h1>{{if .}}<p role="alert">{{.}}</p>{{end}}
<form method="post" action="/login"><label for="token">Token</label><input id="token" name="token" type="password" autocomplete="current-password" required autofocus><button>Log in</button></form>
<p>Tokens are in <code>tokens.json</code> in the state directory of the service; <code>sluice token</code> lists and makes them.</p></body></html>
`))
)

func loginPage(w http.ResponseWriter, status int, message string) {
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", loginPolicy)
	if status == http.StatusTooManyRequests {
		h.Set("Retry-After", strconv.Itoa(60))
	}
	w.WriteHeader(status)
	_ = loginTemplate.Execute(w, message) // the browser may be gone
}
