package wire

import (
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
)

var textUnmarshaler = reflect.TypeFor[encoding.TextUnmarshaler]()

// Misfit is an error of encoding/json in the words of who wrote the JSON, who need not know which Go types it goes into.
func Misfit(err error) error {
	var form *json.UnmarshalTypeError
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return errors.New("ends in the middle of a JSON value")
	case errors.Is(err, io.EOF):
		return errors.New("is empty")
	case errors.As(err, &form):
		is := form.Value
		switch kind, value, _ := strings.Cut(is, " "); kind {
		case "bool":
			is = "true or false"
		case "array":
			is = "a list"
		case "object":
			is = "an object"
		case "string":
			is = "a string"
		case "number":
			if is = value; is == "" {
				is = "a number"
			}
		}
		text := fmt.Sprintf("is %s, want %s", is, wanted(form.Type))
		if form.Field != "" {
			text = form.Field + " " + text
		}
		return errors.New(text)
	case strings.HasPrefix(err.Error(), "json: "):
		return errors.New(strings.TrimPrefix(err.Error(), "json: "))
	}
	return err
}

func wanted(t reflect.Type) string {
	if reflect.PointerTo(t).Implements(textUnmarshaler) {
		return "a string"
	}
	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.String:
		return "a string"
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Struct, reflect.Map:
		return "an object"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return fmt.Sprintf("a whole number from 0 to %d", uint64(1)<<t.Bits()-1)
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return fmt.Sprintf("a whole number up to %d", uint64(1)<<(t.Bits()-1)-1)
	}
	return "something else"
}
