"""Alerts: what people have to look at, evaluated by rules, shown in the console and sent elsewhere.

A *rule* says when something is wrong: tasks are dead, attempts fail, a dataset is stale,
pressure lasts, a source is silent or dead, no worker is seen, messages are parked. Its
*subject* is a job or a dataset. An *alert* is that a rule holds for a subject, from when to
when. A *notice* is one message about an alert, opened or resolved, for one *destination*: a
webhook or mail. Without settings the rules on dead tasks, dead sources, workers and parked
messages are evaluated, and nothing is sent.

| an alert is | means | moved by |
|---|---|---|
| open | the rule holds | the evaluator: it opens it, and keeps its text up to date |
| open, clear since | it does not hold now | the evaluator: holds again → open; a minute → over |
| over | it is past, and never changes | nobody; removed when it is old |

| a notice is | means | moved by |
|---|---|---|
| due | nobody is sending it | any notifier lends it to itself: `due_at` moves past the loan's end |
| lent | one notifier is sending it | that notifier: sent; failed → due again, after a pause |
| | | that grows, or given up; the end of the loan → due |
| sent | the destination has taken it | nobody |
| given up | it failed for a day, and is shown | nobody |

Invariants: - A rule has one open alert for a subject (a unique index), and an alert has one
notice of each kind
  for a destination (a unique constraint). A notice's text and id never change, so that a receiver
  that has seen the id has seen it all.
- The notice of an open alert is made with the alert, in one transaction; that of its end with
  its
  end. The second is not sent before the first was sent or given up.
- One dispatcher evaluates: a turn is one transaction under a named lock, and the same dispatcher
  goes on while it is alive, so that two with different settings do not undo each other's work.
- After an outage of our own, rules about silence open nothing until workers and sources had the
  time to report. What cannot be decided now leaves alerts as they are.

What a crash leaves: an evaluation done or not done. A notice that was being sent is sent again
when its loan is over, by any dispatcher, under the same id: at least once.

Cost: every ten seconds one dispatcher asks two to four short questions and one for each rule.
With destinations, every dispatcher asks for due notices every five seconds, by an index of
nothing else.

| module | owns |
|---|---|
| `rules` | rules and destinations as values, the defaults, and the table `alerts` of the settings |
| `evaluator` | the turn that opens and resolves alerts; findings and decisions are pure |
| `notifier` | the turn that sends notices, their formats, and the destinations |
"""

from __future__ import annotations
