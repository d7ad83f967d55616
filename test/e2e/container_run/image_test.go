package container_run

// program is what the image runs: a server that says who it is, or one that ends
// at once.
const program = `package main

import (
	"fmt"
	"net/http"
	"os"
	"strconv"
)

func main() {
	if len(os.Args) > 2 && os.Args[1] == "exit" {
		fmt.Fprintln(os.Stderr, "last words")
		code, _ := strconv.Atoi(os.Args[2])
		os.Exit(code)
	}
	runs, err := os.OpenFile("/runs/starts", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err == nil {
		fmt.Fprintln(runs, os.Args[1:])
	}
	http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, os.Getenv("SAY")) })
	fmt.Println(http.ListenAndServe("127.0.0.1:8099", nil))
	os.Exit(1)
}
`
