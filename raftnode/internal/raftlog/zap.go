package raftlog

import (
	"context"
	"log/slog"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// zapLogger gives the log library a logger that writes to l. What it calls information is of use only to somebody
// who looks for a fault, so it comes out one level lower. Its Fatal, which would end the process, panics.
func zapLogger(l *slog.Logger) *zap.Logger {
	if l == nil {
		l = slog.New(slog.DiscardHandler)
	}

	return zap.New(&slogCore{l: l}, zap.WithFatalHook(zapcore.WriteThenPanic))
}

// slogCore is a zapcore.Core on a slog.Logger.
type slogCore struct {
	l *slog.Logger
}

func slogLevel(l zapcore.Level) slog.Level {
	switch {
	case l < zapcore.WarnLevel:
		return slog.LevelDebug
	case l == zapcore.WarnLevel:
		return slog.LevelWarn
	}

	return slog.LevelError
}

func (c *slogCore) Enabled(l zapcore.Level) bool {
	return c.l.Enabled(context.Background(), slogLevel(l))
}

func (c *slogCore) With(fields []zapcore.Field) zapcore.Core {
	return &slogCore{l: c.l.With(attrs(fields)...)}
}

func (c *slogCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}

	return ce
}

func (c *slogCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	c.l.Log(context.Background(), slogLevel(e.Level), "raft log: "+e.Message, attrs(fields)...)
	return nil
}

func (c *slogCore) Sync() error { return nil }

func attrs(fields []zapcore.Field) []any {
	enc := zapcore.NewMapObjectEncoder()
	for _, f := range fields {
		f.AddTo(enc)
	}
	var out []any
	for k, v := range enc.Fields {
		out = append(out, slog.Any(k, v))
	}

	return out
}
