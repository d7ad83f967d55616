// Package rpcerr is how an error crosses the wire: a gRPC code, a reason that a
// program can act upon, words for a person, and every field that is wrong. It
// maps both ways.
package rpcerr

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"
)

// Domain is the domain of every reason.
const Domain = "millwright"

// Violation is one field that breaks a rule.
type Violation struct {
	// Field is its path, for example leaves[0].spec.target.
	Field string
	// Value is what was given; empty when it is missing.
	Value string
	// Rule is what must hold, and the way out.
	Rule string
}

// Error is an error for a caller. Its text goes to the caller as it is, so it
// holds nothing that only the server should know. It is immutable once made.
type Error struct {
	// Code is the class.
	Code codes.Code
	// Reason is the code for programs, for example UNKNOWN_KIND.
	Reason string
	// Message is for people: what is wrong, and the way out.
	Message string
	// Violations are the fields that are wrong.
	Violations []Violation
	// RetryAfter, when set, is when a new try is worth it.
	RetryAfter time.Duration
}

// New returns an error without violations.
func New(code codes.Code, reason, format string, args ...any) *Error {
	return &Error{Code: code, Reason: reason, Message: fmt.Sprintf(format, args...)}
}

// Invalid returns an error of code InvalidArgument with all that is wrong.
func Invalid(reason string, violations ...Violation) *Error {
	message := "1 field is not as it must be"
	if n := len(violations); n != 1 {
		message = fmt.Sprintf("%d fields are not as they must be", n)
	}
	return &Error{Code: codes.InvalidArgument, Reason: reason, Message: message, Violations: violations}
}

// Error is the message, and each violation on a line of its own.
func (e *Error) Error() string {
	lines := []string{e.Message}
	for _, v := range e.Violations {
		lines = append(lines, v.Field+": "+v.words())
	}
	return strings.Join(lines, "\n")
}

// GRPCStatus is how gRPC sends the error.
func (e *Error) GRPCStatus() *status.Status {
	details := []protoadapt.MessageV1{&errdetails.ErrorInfo{Reason: e.Reason, Domain: Domain}}
	if len(e.Violations) > 0 {
		bad := &errdetails.BadRequest{}
		for _, v := range e.Violations {
			bad.FieldViolations = append(bad.FieldViolations, &errdetails.BadRequest_FieldViolation{
				Field: v.Field, Description: v.words(), Reason: e.Reason,
			})
		}
		details = append(details, bad)
	}
	if e.RetryAfter > 0 {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(e.RetryAfter)})
	}
	s := status.New(e.Code, e.Message)
	if with, err := s.WithDetails(details...); err == nil {
		return with
	}
	return s
}

// Plain returns the error of a call in the server's words alone, without
// "rpc error: code = ... desc = ". Its status and details can still be had. An
// error that holds no status is returned as it is.
func Plain(err error) error {
	var st interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &st) {
		return err
	}
	return &plain{err: err, words: st.GRPCStatus().Message()}
}

type plain struct {
	err   error
	words string
}

func (p *plain) Error() string { return p.words }

func (p *plain) Unwrap() error { return p.err }

// Reason returns the reason that err carries; empty when it carries none.
func Reason(err error) string {
	if info := detail[*errdetails.ErrorInfo](err); info.GetDomain() == Domain {
		return info.GetReason()
	}
	return ""
}

// Violations returns the fields that err names, with value and rule in Rule.
func Violations(err error) []Violation {
	var out []Violation
	for _, v := range detail[*errdetails.BadRequest](err).GetFieldViolations() {
		out = append(out, Violation{Field: v.GetField(), Rule: v.GetDescription()})
	}
	return out
}

func detail[D any](err error) D {
	var none D
	s, ok := status.FromError(err)
	if !ok {
		var e *Error
		if !errors.As(err, &e) {
			return none
		}
		s = e.GRPCStatus()
	}
	for _, d := range s.Details() {
		if want, ok := d.(D); ok {
			return want
		}
	}
	return none
}

func (v Violation) words() string {
	if v.Value == "" {
		return v.Rule
	}
	return fmt.Sprintf("%q: %s", v.Value, v.Rule)
}
