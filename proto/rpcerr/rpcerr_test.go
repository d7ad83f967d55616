package rpcerr_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/gpuaas/millwright/proto/rpcerr"
)

func TestBothWays(t *testing.T) {
	t.Parallel()
	e := rpcerr.Invalid("SPEC_INVALID",
		rpcerr.Violation{Field: "spec.target", Value: "/", Rule: "choose another path"},
		rpcerr.Violation{Field: "spec.source", Rule: "it is missing"})
	e.RetryAfter = time.Second
	wire := status.Convert(fmt.Errorf("create: %w", e)).Err() // as a client gets it
	for name, err := range map[string]error{"made": e, "wrapped": fmt.Errorf("x: %w", e), "wire": wire} {
		if got := rpcerr.Reason(err); got != "SPEC_INVALID" {
			t.Errorf("%s: Reason = %q", name, got)
		}
		want := []rpcerr.Violation{{Field: "spec.target", Rule: `"/": choose another path`}, {Field: "spec.source", Rule: "it is missing"}}
		if diff := cmp.Diff(want, rpcerr.Violations(err)); diff != "" {
			t.Errorf("%s: Violations (-want +got):\n%s", name, diff)
		}
		if got := status.Code(err); got != codes.InvalidArgument {
			t.Errorf("%s: code %s", name, got)
		}
	}
	if !strings.Contains(e.Error(), `spec.target: "/": choose another path`) {
		t.Errorf("Error() = %q", e.Error())
	}
	var retry bool
	for _, d := range status.Convert(wire).Details() {
		info, ok := d.(*errdetails.RetryInfo)
		retry = retry || ok && info.GetRetryDelay().AsDuration() == time.Second
	}
	if !retry {
		t.Error("no RetryInfo")
	}
}

func TestPlain(t *testing.T) {
	t.Parallel()
	err := fmt.Errorf("join gpu-001: %w", rpcerr.Plain(rpcerr.New(codes.PermissionDenied, "TOKEN_USED", "the token was used").GRPCStatus().Err()))
	if got, want := err.Error(), "join gpu-001: the token was used"; got != want {
		t.Errorf("Plain = %q, want %q", got, want)
	}
	if status.Code(err) != codes.PermissionDenied || rpcerr.Reason(err) != "TOKEN_USED" {
		t.Errorf("code %v, reason %q: want those of the call", status.Code(err), rpcerr.Reason(err))
	}
	if other := errors.New("x"); !errors.Is(rpcerr.Plain(other), other) || rpcerr.Plain(nil) != nil {
		t.Error("an error without a status was changed")
	}
}

func TestErrorsOfOthers(t *testing.T) {
	t.Parallel()
	foreign, err := status.New(codes.Internal, "x").WithDetails(&errdetails.ErrorInfo{Reason: "R", Domain: "elsewhere"})
	if err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{"nil": nil, "plain": errors.New("x"), "status": status.Error(codes.NotFound, "x"), "another domain": foreign.Err()} {
		if got := rpcerr.Reason(err); got != "" {
			t.Errorf("%s: Reason = %q", name, got)
		}
		if got := rpcerr.Violations(err); got != nil {
			t.Errorf("%s: Violations = %v", name, got)
		}
	}
}
