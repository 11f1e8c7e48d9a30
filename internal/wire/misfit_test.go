package wire_test

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

func TestAMisfitIsToldWithoutGoTypes(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]string{
		`{"caps":{"max_bytes":"4GiB"}}`:     "caps.max_bytes is a string, want a whole number up to 9223372036854775807",
		`{"caps":{"max_bytes":1.5}}`:        "caps.max_bytes is 1.5, want a whole number up to 9223372036854775807",
		`{"caps":[]}`:                       "caps is a list, want an object",
		`{"run_id":7}`:                      "run_id is a number, want a string",
		`{"mixed":"yes"}`:                   "mixed is a string, want true or false",
		`{"visibility_timeout_seconds":{}}`: "visibility_timeout_seconds is an object, want a number",
		`{"max_byte":1}`:                    `unknown field "max_byte"`,
		`[]`:                                "is a list, want an object",
		`{`:                                 "ends in the middle of a JSON value",
		``:                                  "is empty",
	} {
		d := json.NewDecoder(bytes.NewReader([]byte(body)))
		d.DisallowUnknownFields()
		err := d.Decode(new(wire.RunSpec))
		if err == nil {
			t.Errorf("%s is taken", body)
		} else if got := wire.Misfit(err).Error(); got != want {
			t.Errorf("%s: %q, want %q", body, got, want)
		}
	}
	var settle wire.Settle
	err := json.Unmarshal([]byte(`{"settlements":[{"lease":4}]}`), &settle)
	if got, want := wire.Misfit(err).Error(), "settlements.lease is a number, want a string"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	own := &sluice.Error{Kind: sluice.Invalid, Op: "lease id", Detail: "wants 32 hexadecimal digits"}
	if got := wire.Misfit(own).Error(); got != own.Error() {
		t.Error("another error does not come back as it was")
	}
}
