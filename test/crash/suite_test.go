package main

import (
	"slices"
	"strings"
	"testing"
)

// The cases of a story with a server of its own are left out where another story
// comes by the same point, but for those that it is there for.
func TestSpare(t *testing.T) {
	made := func(title string, own bool, strikes, at string) job {
		return job{story{kind: title, own: own, strikes: strikes}, injury{point{Name: at, Program: server}, 1, "kill"}}
	}
	var got []string
	for _, j := range spare([]job{
		made("kind", false, "", "server.assign.sent"),
		made("(a)", true, "", "server.assign.sent"), made("(a)", true, "", "server.token.before"),
		made("(b)", true, "", "server.token.before"),
		made("(c)", true, "server.secret.", "server.secret.kept"), made("(c)", true, "server.secret.", "server.assign.sent"),
		made("(d)", true, "server.secret.", "server.secret.kept"),
	}) {
		got = append(got, j.story.kind+" "+j.injury.point.Name)
	}
	want := []string{"kind server.assign.sent", "(a) server.token.before", "(c) server.secret.kept", "(d) server.secret.kept"}
	if !slices.Equal(got, want) {
		t.Errorf("what is left is %v, want %v", got, want)
	}
}

// At points that say nothing about the task one story of each kind is left, and no
// slow one where a quick one comes by the point; of all other points none goes.
func TestSpareMute(t *testing.T) {
	made := func(kind, variant string, slow bool, at, spot string) job {
		return job{story{kind: kind, variant: variant, slow: slow}, injury{point{Name: at, Program: agent, Spot: spot}, 1, "kill"}}
	}
	var got []string
	for _, j := range spare([]job{
		made("a", "", false, "ack", "apart"), made("a", "", false, "plan", "within"),
		made("a", "fails", false, "ack", "apart"), made("a", "fails", false, "plan", "within"), made("a", "fails", false, "cancel", "apart"),
		made("b", "", false, "ack", "apart"),
		made("s", "", true, "ack", "apart"), made("s", "", true, "drain", "message"), made("s", "", true, "plan", "within"),
	}) {
		got = append(got, j.story.title()+" "+j.injury.point.Name)
	}
	want := []string{"a ack", "a plan", "a fails plan", "a fails cancel", "b ack", "s drain", "s plan"}
	if !slices.Equal(got, want) {
		t.Errorf("what is left is %v, want %v", got, want)
	}
}

// Of slow stories of one kind that end alike the first is struck at each point, and
// the others where only they come by; those that turn back are another matter.
func TestSpareSlow(t *testing.T) {
	made := func(variant string, back bool, at, mode string) job {
		one := story{kind: "join", variant: variant, slow: true, state: succeeded}
		if back {
			one.state = failed
		}
		return job{one, injury{point{Name: at, Program: agent, Spot: "after"}, 1, mode}}
	}
	var got []string
	for _, j := range spare([]job{
		made("", false, "write", "kill"), made("", false, "write", "kill"), made("", false, "write", "fail"),
		made("with packages", false, "write", "kill"), made("with packages", false, "install", "kill"),
		made("that fails", true, "write", "kill"), made("that fails", true, "write", "fail"),
		made("with packages, and fails", true, "write", "kill"), made("with packages, and fails", true, "install", "kill"),
	}) {
		got = append(got, strings.TrimSpace(j.story.variant+" "+j.injury.point.Name+" "+j.injury.mode))
	}
	want := []string{"write kill", "write kill", "write fail", "with packages install kill",
		"that fails write kill", "that fails write fail", "with packages, and fails install kill"}
	if !slices.Equal(got, want) {
		t.Errorf("what is left is %v, want %v", got, want)
	}
}
