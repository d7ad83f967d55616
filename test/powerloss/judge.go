package powerloss

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"
)

// Verdict is what the programs agent/internal/verdict and
// controlplane/internal/verdict find in an image. Each fills its own part.
type Verdict struct {
	Error string `json:"error"`

	Joined  bool     `json:"joined"`
	Journal string   `json:"journal"`
	Head    uint64   `json:"head"`
	Acked   uint64   `json:"acked"`
	Outputs []string `json:"outputs"`
	Ran     []string `json:"ran"`
	Ended   []string `json:"ended"`

	Founded bool              `json:"founded"`
	Last    uint64            `json:"last"`
	Tasks   []string          `json:"tasks"`
	Nodes   []string          `json:"nodes"`
	Frames  map[string]uint64 `json:"frames"`
}

// patience is how long a program may look at one image.
const patience = 10 * time.Second

// judge is a program that judges images, one after the other.
type judge struct {
	program string
	dir     string // where an image is put
	cmd     *exec.Cmd
	in      io.WriteCloser
	out     *bufio.Reader
	said    *bytes.Buffer
}

// startJudge starts the program with a directory of its own below dir.
func startJudge(ctx context.Context, program, dir string) (*judge, error) {
	own, err := os.MkdirTemp(dir, "image-")
	if err != nil {
		return nil, err
	}
	j := &judge{program: program, dir: own}
	return j, j.start(ctx)
}

func (j *judge) start(ctx context.Context) error {
	j.said = &bytes.Buffer{}
	// A damaged file can make a program loop, or ask for all memory.
	j.cmd = exec.CommandContext(ctx, "sh", "-c", `ulimit -v 8388608; exec "$0"`, j.program)
	j.cmd.Stderr = j.said
	out, err := j.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if j.in, err = j.cmd.StdinPipe(); err != nil {
		return err
	}
	j.out = bufio.NewReader(out)
	return j.cmd.Start()
}

// empty makes room for the next image.
func (j *judge) empty() error {
	return errors.Join(os.RemoveAll(j.dir), os.Mkdir(j.dir, 0o700))
}

// ask returns what the program finds. A program that dies of an image has found
// that it cannot be used.
func (j *judge) ask(ctx context.Context) (*Verdict, error) {
	if _, err := fmt.Fprintln(j.in, j.dir); err != nil {
		return nil, fmt.Errorf("ask %s: %w", j.program, err)
	}
	late := time.AfterFunc(patience, func() { _ = j.cmd.Process.Kill() })
	line, err := j.out.ReadBytes('\n')
	if intime := late.Stop(); err != nil || !intime {
		_ = j.cmd.Wait() // that it died is what is told
		v := &Verdict{Error: "the program died or hung: " + shorten(j.said.String())}
		return v, errors.Join(ctx.Err(), j.start(ctx))
	}
	v := new(Verdict)
	return v, json.Unmarshal(line, v)
}

func (j *judge) close() error { return errors.Join(j.in.Close(), j.cmd.Wait()) }
