package ctl

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// explain turns the error of a call into one for a person, with its exit code.
// doing says what was attempted.
func (c *client) explain(ctx context.Context, doing string, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(context.Cause(ctx), errTimedOut) {
		return &failure{code: exitTimeout, err: fmt.Errorf("%s: %w", doing, errTimedOut)}
	}
	st, ok := status.FromError(err)
	if !ok {
		return fmt.Errorf("%s: %w", doing, err)
	}
	if st.Code() == codes.Unavailable {
		if cause := c.trouble(); cause != nil {
			return c.unreachable(doing, cause)
		}
	}
	text := fmt.Sprintf("%s: %s", doing, st.Message())
	for _, line := range details(st) {
		text += "\n" + line
	}
	if way := wayOut(st.Code()); way != "" {
		text += "\n" + way
	}
	return &failure{code: exitOf(st.Code()), err: errors.New(text)}
}

// explainTasks is explain for a request with leaves: a field of a leaf is told
// with the leaf's node in place of its index.
func (c *client) explainTasks(ctx context.Context, doing string, err error, leaves []*taskv1.TaskLeaf) error {
	told := c.explain(ctx, doing, err)
	var f *failure
	if !errors.As(told, &f) || f.err == nil {
		return told
	}
	text := regexp.MustCompile(`(?m)^leaves\[(\d+)\]\.?`).ReplaceAllStringFunc(f.err.Error(), func(s string) string {
		digits := strings.Trim(s, "leavs[].")
		if i, err := strconv.Atoi(digits); err == nil && i < len(leaves) {
			return leaves[i].GetNode() + ": "
		}
		return s
	})
	return &failure{code: f.code, err: errors.New(text)}
}

// details tells the parts of a status that a program would read.
func details(st *status.Status) []string {
	var lines []string
	for _, d := range st.Details() {
		switch d := d.(type) {
		case *errdetails.BadRequest:
			for _, v := range d.GetFieldViolations() {
				lines = append(lines, v.GetField()+": "+v.GetDescription())
			}
		case *errdetails.PreconditionFailure:
			for _, v := range d.GetViolations() {
				lines = append(lines, strings.TrimPrefix(v.GetSubject()+": "+v.GetDescription(), ": "))
			}
		case *errdetails.ResourceInfo:
			if d.GetDescription() != "" {
				lines = append(lines, d.GetResourceType()+" "+d.GetResourceName()+": "+d.GetDescription())
			}
		case *errdetails.RetryInfo:
			if wait := d.GetRetryDelay().AsDuration(); wait > 0 {
				lines = append(lines, "try again in "+wait.Round(time.Second).String())
			}
		case *errdetails.Help:
			for _, l := range d.GetLinks() {
				lines = append(lines, l.GetDescription()+": "+l.GetUrl())
			}
		}
	}
	return lines
}

// wayOut is what to do about a status of which the server's message need not
// say it.
func wayOut(c codes.Code) string {
	switch c {
	case codes.Unauthenticated:
		return "see who you are with: millctl whoami"
	case codes.Unimplemented:
		return "the server does not serve this; is it older than millctl? Compare with: millctl whoami"
	case codes.DeadlineExceeded:
		return "the server did not answer in time; try again"
	default:
		return ""
	}
}
