-- Sessions of the console that people have ended. See penstock.dispatcher.sessions.

CREATE TABLE ended_session (
    number text PRIMARY KEY CHECK (length(number) BETWEEN 1 AND 100),
    -- By when no dispatcher would take it any more.
    forget_at timestamptz NOT NULL
);
CREATE INDEX ended_session_forget ON ended_session (forget_at);
