package wire

import (
	"encoding/hex"
	"encoding/json"
	"strconv"
)

// AppendJSON appends what encoding/json makes of d without escapes for HTML. That would read each ref twice more, and refs are nearly all of a delivery.
func (d *Delivery) AppendJSON(b []byte) ([]byte, error) {
	b = append(b, `{"leases":`...)
	if d.Leases == nil {
		b = append(b, "null"...)
	} else {
		b = append(b, '[')
	}
	for i := range d.Leases {
		l := &d.Leases[i]
		if i > 0 {
			b = append(b, ',')
		}
		if l.Ref.IsZero() {
			_, err := l.Ref.MarshalJSON()
			return nil, err
		}
		b = append(hex.AppendEncode(append(b, `{"id":"`...), l.ID[:]), `","ref":`...)
		b = append(l.Ref.AppendCanonical(b), `,"time_left_seconds":`...)
		var err error
		if b, err = appendValue(b, l.TimeLeftSeconds); err != nil {
			return nil, err
		}
		b = strconv.AppendInt(append(b, `,"redelivery":`...), int64(l.Redelivery), 10)
		if l.Window != nil {
			if b, err = appendValue(append(b, `,"window":`...), l.Window); err != nil {
				return nil, err
			}
		}
		b = append(b, '}')
	}
	if d.Leases != nil {
		b = append(b, ']')
	}
	b = strconv.AppendBool(append(b, `,"end":`...), d.End)
	if d.Cause != nil {
		var err error
		if b, err = appendValue(append(b, `,"cause":`...), d.Cause); err != nil {
			return nil, err
		}
	}
	if d.WaitedSeconds != 0 {
		var err error
		if b, err = appendValue(append(b, `,"waited_seconds":`...), d.WaitedSeconds); err != nil {
			return nil, err
		}
	}
	return append(b, '}'), nil
}

func appendValue(b []byte, v any) ([]byte, error) {
	text, err := json.Marshal(v)
	return append(b, text...), err
}
