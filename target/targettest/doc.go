// Package targettest is the conformance suite of [sluice.Target] and a fake that passes it.
//
// A backend proves itself by one call:
//
//	func TestTarget(t *testing.T) {
//		targettest.Run(t, targettest.Harness{New: func(t *testing.T) sluice.Target { return mytarget.New(...) }})
//	}
//
// The suite needs no reference values. It checks what must be true of any causal model: the outputs at position t depend
// on the tokens up to t of the same document and on nothing else, so that cutting a row, padding it, putting it beside other rows or packing
// it with other documents changes nothing. A model that shifts its rows by one, mixes up rows or attends to padding fails.
// Whether the numbers are the right ones is for the backend's own tests.
//
// [Fake] is for the tests of whoever uses targets: it keeps the contract, and does on demand what targets do on bad days.
package targettest
