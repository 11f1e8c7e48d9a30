package natsjournal

func runChild() {}
