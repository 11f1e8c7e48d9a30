package wire

// API is the state of the API that this service speaks, and of the flags that start it. It grows by one with each addition that a client can depend on; nothing is ever
// taken away under /v1. A client compares it with the least that it needs.
const API = 1
