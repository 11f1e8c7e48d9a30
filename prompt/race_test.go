//go:build race

package prompt_test

func init() { memoryLines = 4 << 10 } // the race detector makes each byte ten times as dear
