package access

import (
	"crypto/sha256"
	"errors"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-ml/sluice"
)

func (w *house) logIn(token string) (answer, *http.Cookie) {
	w.t.Helper()
	a := w.do(w.request("POST", "/login", "token="+token, "Content-Type: application/x-www-form-urlencoded", "Sec-Fetch-Site: same-origin"))
	for _, line := range a.header.Values("Set-Cookie") {
		if c, err := http.ParseSetCookie(line); err == nil {
			return a, c
		}
	}
	return a, nil
}

func TestABrowserLogsInWithATokenAndOutAgain(t *testing.T) {
	t.Parallel()
	w := open(t, nil, nil)
	page := w.request("GET", "/", "", "Accept: text/html,*/*")
	if a := w.do(page); a.status != 303 || a.header.Get("Location") != "/login" {
		t.Errorf("the dashboard without a login: %d %v", a.status, a.header)
	}
	if a := w.do(w.request("GET", "/login", "")); a.status != 200 || !strings.Contains(a.body, `name="token"`) || strings.Contains(a.body, "<script") {
		t.Errorf("the form: %d %s", a.status, a.body)
	}
	a, cookie := w.logIn(w.token("operator"))
	if a.status != 303 || cookie == nil {
		t.Fatalf("a right token: %d %s", a.status, a.body)
	}
	if !cookie.HttpOnly || cookie.SameSite != http.SameSiteStrictMode || cookie.Secure || cookie.Path != "/" || cookie.MaxAge != 12*3600 || cookie.Value == w.token("operator") || len(cookie.Value) < 26 {
		t.Errorf("the cookie is %v", cookie)
	}
	with := "Cookie: " + cookie.Name + "=" + cookie.Value
	for name, c := range map[string]struct {
		method, header string
		status         int
	}{
		"a look":                  {"GET", "Accept: */*", 200},
		"the page acts":           {"POST", "Sec-Fetch-Site: same-origin", 200},
		"an old browser's page":   {"POST", "Origin: " + w.url, 200},
		"another site acts":       {"POST", "Sec-Fetch-Site: cross-site", 403},
		"another port acts":       {"POST", "Sec-Fetch-Site: same-site", 403},
		"typed into the bar":      {"POST", "Sec-Fetch-Site: none", 403},
		"nobody says where from":  {"DELETE", "Accept: */*", 403},
		"another site, no method": {"POST", "Origin: http://evil.example", 403},
	} {
		if a := w.do(w.request(c.method, "/v1/runs", "", with, c.header)); a.status != c.status {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
	}
	if a := w.do(w.request("GET", "/logout", "", with)); a.status != 405 {
		t.Errorf("a link that logs out: %d", a.status)
	}
	if a := w.do(w.request("POST", "/logout", "", with, "Sec-Fetch-Site: same-origin")); a.status != 303 || !strings.Contains(a.header.Get("Set-Cookie"), "Max-Age=0") {
		t.Errorf("logging out: %d %v", a.status, a.header)
	}
	if a := w.do(w.request("GET", "/v1/runs", "", with)); a.status != 401 {
		t.Errorf("after that: %d", a.status)
	}
}

func TestALoginHasTheRightsOfItsTokenAndEndsWithIt(t *testing.T) {
	t.Parallel()
	w := open(t, nil, nil)
	_, cookie := w.logIn(w.token("consumer"))
	with := "Cookie: " + cookie.Name + "=" + cookie.Value
	if a := w.do(w.request("GET", "/", "", with)); !strings.HasPrefix(a.body, "consumer consumer") {
		t.Errorf("%d %s", a.status, a.body)
	}
	if err := RevokeToken(w.dir, "consumer"); err != nil {
		t.Fatal(err)
	}
	w.d.keys.mu.Lock()
	w.d.keys.checked = time.Time{}
	w.d.keys.mu.Unlock()
	if a := w.do(w.request("GET", "/", "", with)); a.status != 401 {
		t.Errorf("with a revoked token: %d", a.status)
	}
}

func TestFailedLogins(t *testing.T) {
	t.Parallel()
	w := open(t, nil, nil)
	good := w.token("operator")
	for name, r := range map[string]*http.Request{
		"wrong":           w.request("POST", "/login", "token=AAAAAAAAAAAAAAAAAAAAAAAAAA", "Content-Type: application/x-www-form-urlencoded"),
		"none":            w.request("POST", "/login", "", "Content-Type: application/x-www-form-urlencoded"),
		"in the URL":      w.request("POST", "/login?token="+good, "", "Content-Type: application/x-www-form-urlencoded"),
		"another media":   w.request("POST", "/login", "token="+good, "Content-Type: text/plain"),
		"a form too long": w.request("POST", "/login", "x="+strings.Repeat("a", maxForm)+"&token="+good, "Content-Type: application/x-www-form-urlencoded"),
		"another method":  w.request("PUT", "/login", "token="+good),
		"another site":    w.request("POST", "/login", "token="+good, "Content-Type: application/x-www-form-urlencoded", "Origin: http://evil.example"),
	} {
		if a := w.do(r); a.status < 400 || a.status >= 500 || a.header.Get("Set-Cookie") != "" {
			t.Errorf("%s: %d %v", name, a.status, a.header)
		}
	}
	var a answer
	for range failBurst + 1 {
		a, _ = w.logIn("AAAAAAAAAAAAAAAAAAAAAAAAAA")
	}
	if a.status != 429 || a.header.Get("Retry-After") == "" {
		t.Errorf("after many: %d", a.status)
	}
	if log := w.log.String(); strings.Contains(log, good) || strings.Contains(log, "AAAAAAAA") {
		t.Errorf("a token is in the log: %s", log)
	}
}

func TestTheCookieIsSecureWithTLS(t *testing.T) {
	t.Parallel()
	w := open(t, nil, func(o *Options) { o.TLSSelfSigned = true })
	if c := w.d.cookie("x", time.Hour); !c.Secure || !c.HttpOnly {
		t.Errorf("%v", c)
	}
}

func TestLoginsEndAfterTwelveHoursAndAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var l logins
		token := sha256.Sum256([]byte("t"))
		keys := &keyring{now: func() time.Time { return time.Time{} }, keys: []key{{token, Caller{Name: "op"}}}}
		first := l.add(token)
		time.Sleep(loginLife - time.Second)
		if c, err := l.caller(first, keys); err != nil || c.Name != "op" {
			t.Errorf("before its end: %v %v", c, err)
		}
		time.Sleep(2 * time.Second)
		if _, err := l.caller(first, keys); !errors.Is(err, sluice.ErrDenied) {
			t.Errorf("after its end: %v", err)
		}
		var ids []string
		for range maxLogins + 10 {
			ids = append(ids, l.add(token))
			time.Sleep(time.Second)
		}
		if len(l.open) != maxLogins {
			t.Errorf("%d logins are kept", len(l.open))
		}
		if _, err := l.caller(ids[9], keys); err == nil {
			t.Error("the oldest did not go")
		}
		if _, err := l.caller(ids[10], keys); err != nil {
			t.Errorf("one that is not among the oldest went: %v", err)
		}
	})
}

func TestFailuresAreForgivenWithTimeAndBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var f failures
		for i := range failBurst {
			if !f.allow("a") {
				t.Fatalf("the try %d is too many", i)
			}
		}
		if f.allow("a") {
			t.Error("one more is allowed")
		}
		if !f.allow("b") {
			t.Error("another address pays for it")
		}
		time.Sleep(failEvery + time.Nanosecond)
		if !f.allow("a") || f.allow("a") {
			t.Error("it is not one try after each pause")
		}
		for i := range 3 * maxFailures {
			f.allow(strings.Repeat("x", i%7) + string(rune(i)))
		}
		if len(f.from) > maxFailures+1 {
			t.Errorf("%d addresses are remembered", len(f.from))
		}
		time.Sleep(time.Hour)
		f.allow("new")
		if len(f.from) > 2 {
			t.Errorf("%d are not forgotten", len(f.from))
		}
	})
}
