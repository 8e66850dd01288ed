// Render an Ollama template with Go's text/template: JSON jobs on standard input, JSON texts on standard output.
package main

import (
	"encoding/json"
	"os"
	"strings"
	"text/template"
)

type Message struct{ Role, Content string }

type Job struct {
	Template, System, Prompt string
	Messages                 []Message
}

func main() {
	var jobs []Job
	if err := json.NewDecoder(os.Stdin).Decode(&jobs); err != nil {
		panic(err)
	}
	texts := []string{}
	for _, job := range jobs {
		var out strings.Builder
		if err := template.Must(template.New("").Parse(job.Template)).Execute(&out, job); err != nil {
			panic(err)
		}
		texts = append(texts, out.String())
	}
	if err := json.NewEncoder(os.Stdout).Encode(texts); err != nil {
		panic(err)
	}
}
