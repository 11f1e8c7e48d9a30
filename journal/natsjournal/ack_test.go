package natsjournal

import (
	"encoding/json"
	"errors"
	"testing"

	"github.com/nats-io/nats.go/jetstream"
)

func TestAcknowledgements(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]uint64{
		`{"stream":"s","seq":17}`: 17, `{"stream":"other","seq":17}`: 17, `{"stream":"s", "seq":17}`: 17, `{"seq":17,"stream":"s"}`: 17, `{"stream":"s","domain":"d","seq":17}`: 17, `{"stream":"s","seq":17,"duplicate":true}`: 17,
		`{"stream":"a\",\"seq\":3,\"","seq":17}`: 17, `{"stream":"s","seq":18446744073709551615}`: 18446744073709551615,
	} {
		if got, err := storedAt("s", []byte(text)); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{``, `{`, `{}`, `null`, `{"stream":"","seq":17}x`, `{"stream":"s","seq":}`, `{"stream":"s","seq":-1}`, `{"stream":"s","seq":1}}`, `{"stream":"s","seq":01}`, `{"stream":"s","seq":+1}`, `{"seq":17}`} {
		if got, err := storedAt("s", []byte(text)); !errors.Is(err, jetstream.ErrInvalidJSAck) {
			t.Errorf("%s: %d, %v, want %v", text, got, err, jetstream.ErrInvalidJSAck)
		}
	}
	var api *jetstream.APIError
	if _, err := storedAt("s", []byte(`{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 5"},"stream":"s","seq":0}`)); !errors.As(err, &api) || api.ErrorCode != jetstream.JSErrCodeStreamWrongLastSequence {
		t.Errorf("a refusal: %v", err)
	}
}

func FuzzAcknowledgement(f *testing.F) {
	f.Add([]byte(`{"stream":"s","seq":17}`))
	f.Add([]byte(`{"stream":"s\\","seq":17}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		got, err := storedAt("s", text)
		if err != nil {
			return
		}
		var want jetstream.PubAck
		if err := json.Unmarshal(text, &want); err != nil || got != want.Sequence {
			t.Errorf("%q: %d, encoding/json says %d, %v", text, got, want.Sequence, err)
		}
	})
}
