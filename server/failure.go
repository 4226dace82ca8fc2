package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"strings"

	"github.com/snapferry/snapferry/checkpoint"
	"github.com/snapferry/snapferry/internal/cpwire"
	"github.com/snapferry/snapferry/raftnode"
	"github.com/snapferry/snapferry/server/internal/tasklog"
)

var (
	errNoRoute    = fmt.Errorf("the service has no such path: %w", fs.ErrNotExist)
	errOtherGroup = errors.New("this member belongs to another group")
	errMethod     = errors.New("the path has no such method")
	errStarting   = errors.New("the member is starting")
	errNoLeader   = errors.New("no leader is known")
)

func invalid(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, fs.ErrInvalid)...)
}

// kinds tells codes and HTTP statuses from errors; the first that fits counts. That an
// outcome is unknown outweighs why.
var kinds = []struct {
	is     error
	code   cpwire.Code
	status int
}{
	{raftnode.ErrUnknown, cpwire.CodeUnknown, http.StatusServiceUnavailable},
	{raftnode.ErrNotLeader, cpwire.CodeNotLeader, http.StatusMisdirectedRequest},
	{errMethod, cpwire.CodeInvalid, http.StatusMethodNotAllowed},
	{errOtherGroup, cpwire.CodeOtherGroup, http.StatusConflict},
	{errStarting, cpwire.CodeUnavailable, http.StatusServiceUnavailable},
	{errNoLeader, cpwire.CodeUnavailable, http.StatusServiceUnavailable},
	{raftnode.ErrBusy, cpwire.CodeUnavailable, http.StatusServiceUnavailable},
	{raftnode.ErrClosed, cpwire.CodeUnavailable, http.StatusServiceUnavailable},
	{raftnode.ErrRemoved, cpwire.CodeUnavailable, http.StatusServiceUnavailable},
	{raftnode.ErrConflict, cpwire.CodeConflict, http.StatusConflict},
	{context.DeadlineExceeded, cpwire.CodeUnavailable, http.StatusServiceUnavailable},
	{context.Canceled, cpwire.CodeUnavailable, http.StatusServiceUnavailable},
	{checkpoint.ErrCorrupt, cpwire.CodeCorrupt, http.StatusInternalServerError},
	{tasklog.ErrUnsupported, cpwire.CodeUnsupported, http.StatusNotImplemented},
	{tasklog.ErrMalformed, cpwire.CodeInvalid, http.StatusBadRequest},
	{raftnode.ErrNoMember, cpwire.CodeNotFound, http.StatusNotFound},
	{fs.ErrNotExist, cpwire.CodeNotFound, http.StatusNotFound},
	{fs.ErrInvalid, cpwire.CodeInvalid, http.StatusBadRequest},
}

// fail answers with an error.
func (s *service) fail(w http.ResponseWriter, op, subject string, err error) {
	f := cpwire.Failure{Error: &cpwire.Error{Code: cpwire.CodeInternal, Op: op, Subject: subject, Message: cause(op, err)}}
	status := http.StatusInternalServerError
	for _, k := range kinds {
		if errors.Is(err, k.is) {
			f.Error.Code, status = k.code, k.status
			break
		}
	}
	if e, ok := errors.AsType[*http.MaxBytesError](err); ok {
		f.Error.Code, status = cpwire.CodeInvalid, http.StatusRequestEntityTooLarge
		f.Error.Message = fmt.Sprintf("request has more than %d bytes", e.Limit)
	}
	if f.Error.Code == cpwire.CodeNotLeader {
		f.Leader = &cpwire.Member{}
		if e, ok := errors.AsType[*raftnode.NotLeaderError](err); ok {
			f.Leader = &cpwire.Member{ID: e.Leader.Name, URL: e.Leader.URL}
		}
	}
	s.respond(w, status, f)
}

// cause is the text of an error of op, of which the node may have said the same already.
func cause(op string, err error) string {
	if e, ok := err.(*raftnode.Error); ok && e.Op == op {
		err = e.Err
	}
	return err.Error()
}

func (s *service) respond(w http.ResponseWriter, status int, v any) {
	data, err := json.Marshal(v)
	if err != nil {
		status, data = http.StatusInternalServerError, nil // plain values only, so it does not happen
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, err = w.Write(append(data, '\n'))
	s.sent(err)
}

// afterTask reads the name of the task that a page follows.
func afterTask(v string) (cpwire.Task, error) {
	if v == "" {
		return cpwire.Task{}, nil
	}
	job, name, _ := strings.Cut(v, "/")
	t := cpwire.Task{Job: job, Name: name}
	return t, t.Validate()
}
