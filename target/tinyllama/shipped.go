package tinyllama

import (
	"embed"
	"io/fs"
)

//go:embed austen/config.json austen/model.safetensors
var austen embed.FS

// Checkpoint is the folder of the model that comes with the package, for [Load] or for copying: a byte model of 1.5 million
// parameters, trained on Jane Austen's novels and short conversations about them.
func Checkpoint() fs.FS {
	folder, err := fs.Sub(austen, "austen")
	if err != nil {
		panic(err) // the name is a valid path, which is all that Sub asks for
	}
	return folder
}

// Shipped loads the model that comes with the package. It takes tens of milliseconds and touches no file.
func Shipped() (*Model, error) { return load(Checkpoint(), "austen", "") }
