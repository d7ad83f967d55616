// Package ctl is millctl, the operator's command line.
//
// What a command is asked for goes to standard output; everything else, such as
// progress, remarks and what to do next, goes to standard error. With -o json
// the output is the protojson of a public message, in one document: the Task or
// Node of a get, the whole response of a list (with all pages that were asked
// for merged into one). Streams (task watch) write one such message a line.
// Tables are for people and may change. There are no colours, so that NO_COLOR
// and TERM=dumb have nothing to switch off. Times are RFC 3339 in the local
// time zone.
//
// Exit codes: 0 done; 1 error; 2 usage, or a spec or value that is not valid; 3
// a task ended and did not succeed, or is held; 4 not authenticated or not
// allowed; 5 not found; 6 conflict; 7 timed out waiting; 130 interrupted.
//
// Keys and contexts lie in $MILLWRIGHT_HOME: see package home.
package ctl
