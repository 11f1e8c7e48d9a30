// Package tinyllama is a Llama model on the CPU: a [sluice.Target] and a [sluice.Tokenizer] without a GPU, a server or a download.
//
// It is the real architecture (RMSNorm, rotary embeddings, grouped-query attention, SwiGLU, tied or untied head), reads ordinary
// Hugging Face folders, and brings a small trained model along:
//
//	model, err := tinyllama.Shipped()          // or Open("path/to/folder")
//	out, err := model.Forward(ctx, batch, sluice.Want{AuxLayers: model.Info().DefaultAuxLayers(), Last: sluice.PostNorm})
//
// So demonstrations, tests and tutorials stream hidden states that mean something. It is for models of millions of parameters; run real
// targets on an inference server.
//
// # Numbers
//
// Weights may be float32, float16 or bfloat16; all arithmetic and every output is float32. Outputs agree with PyTorch's in float64 to about 1e-6
// of a tensor's largest value.
//
// Forward is deterministic to the bit. Every output element is added up in an order that depends on its own document only, so a row has
// the same bits alone or in any batch, with any padding, packed with other documents or not, on any number of processors: a stream can be compared with a direct
// forward by bytes. That holds on one architecture; others (arm64, say) may fuse multiplications and additions and round otherwise.
//
// Padding costs nothing: only real tokens are computed. Neither do layers above the last one that is asked for, nor logits, unless asked for.
//
// # The tokenizer
//
// Text is bytes: ids 0 to 255 are themselves, 256 to 262 are <bos>, <eos>, <pad>, <system>, <user>, <assistant> and <end>. A conversation is
//
//	<bos> <user> W h y ? <end> <assistant> W h y   n o t . <end>
//
// and the loss mask covers the assistant's bytes and its <end>.
package tinyllama
