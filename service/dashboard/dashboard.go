// Package dashboard is the page at /: each run as a basin with its two marks and its level, what flows in and out, who waits for what, and in a sentence which side
// holds the other up. It is three files in the binary, without anything from elsewhere, and lives on the service's own event stream.
package dashboard

import (
	"embed"
	"net/http"
	"path"
)

//go:embed page/index.html page/style.css page/app.js
var page embed.FS

// Policy is the page's Content-Security-Policy: its own scripts and styles, its own service, and nothing inline.
const Policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

var types = map[string]string{".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}

// Register adds the page to a mux: GET / and what it loads.
func Register(mux *http.ServeMux) {
	for route, file := range map[string]string{"GET /{$}": "index.html", "GET /dashboard/style.css": "style.css", "GET /dashboard/app.js": "app.js"} {
		data, err := page.ReadFile("page/" + file)
		if err != nil {
			panic(err) // the file is embedded three lines above
		}
		mux.HandleFunc(route, func(w http.ResponseWriter, _ *http.Request) {
			h := w.Header()
			h.Set("Content-Type", types[path.Ext(file)])
			h.Set("Content-Security-Policy", Policy)
			h.Set("X-Content-Type-Options", "nosniff")
			h.Set("Referrer-Policy", "no-referrer")
			h.Set("Cache-Control", "no-cache")
			_, _ = w.Write(data) // the browser may be gone
		})
	}
}
