package wire_test

import (
	"testing"

	"github.com/sluice-ml/sluice/internal/wire"
)

func TestAnIDThatIsMissingIsNamed(t *testing.T) {
	t.Parallel()
	for want, body := range map[string]interface{ Check() error }{
		`body "run_id": is missing`:                                       &wire.RunSpec{},
		`body "sample_id": is missing`:                                    &wire.Stage{File: "f"},
		`body "consumer.name": is missing`:                                &wire.Leave{},
		`body "producer.name": is missing`:                                &wire.Report{},
		`id "a b": wants [A-Za-z0-9_][A-Za-z0-9._:-]{0,199} without ".."`: &wire.RunSpec{RunID: "a b"},
	} {
		if err := body.Check(); err == nil || err.Error() != want {
			t.Errorf("%T: got %v, want %s", body, err, want)
		}
	}
}
