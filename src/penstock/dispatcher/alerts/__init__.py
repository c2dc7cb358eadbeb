"""Alerts: what people have to look at, judged by rules, shown in the console, and told elsewhere.

A *rule* says when something is the matter: tasks are dead, attempts fail, a dataset is stale,
pressure lasts, a source is silent or dead, no worker is heard of, messages are parked. What it is
about (a job, a dataset) is its *subject*. An *alert* is that a rule holds for a subject, from when
to when. A *notice* is one message about an alert, that it is open or that it is over, for one
*destination*: a webhook or mail. Without any settings the rules on dead tasks, dead sources,
workers and parked messages are judged, and nothing is sent anywhere.

| an alert is | means | moved by |
|---|---|---|
| open | the rule holds | the judge: it opens it, and keeps its words up to date |
| open, clear since | it does not hold now | the judge: it holds again → open; for a minute → over |
| over | it is past, and never changes | nobody; removed when it is old |

| a notice is | means | moved by |
|---|---|---|
| due | nobody has it in hand | any teller lends it to itself: `due_at` moves past the loan's end |
| lent | one teller is sending it | that teller: sent; failed → due again, after a pause that |
| | | grows, or given up; the end of the loan → due |
| sent | the destination has taken it | nobody |
| given up | it failed for a day, and is shown | nobody |

Invariants:
- A rule has one open alert for a subject (a unique index), and an alert has one notice of each kind
  for a destination (a unique constraint). A notice's words and id never change, so that a receiver
  that has seen the id has seen it all.
- The notice that an alert is open is made with the alert, in one transaction; that it is over with
  its end. The second is not sent before the first was sent or given up.
- One dispatcher judges: a turn is one transaction under a named lock, and the same dispatcher goes
  on as long as it is heard of, so that two that are set differently do not undo each other's work.
- What nobody was heard of is no news after an outage of our own: rules about silence open nothing
  until those who could not reach us had the time to. What cannot be said now leaves alerts as
  they are.

What a crash leaves: a turn of the judge done or not done. A notice that was being sent is sent
again when its loan is over, by any dispatcher, under the same id: at least once. Each is recorded
by itself, so a crash doubles one at a destination at most.

What it costs: every ten seconds one dispatcher asks two to four short questions and one for each
rule; the others try the lock. While there are destinations, every dispatcher asks for due notices
every five seconds, by an index that holds nothing else. The judge writes only what has changed.

| module | owns |
|---|---|
| `rules` | rules and destinations as values, and the rules without settings |
| `reading` | the table `alerts` of the settings, read and refused; pure |
| `findings` | rows to what is the matter, in words; pure |
| `deciding` | what is the matter and what was, to what becomes of alerts; pure |
| `judging` | the turn of the judge |
| `notices` | a notice as JSON, signed, and as mail; pure |
| `telling` | the turn of a teller: lends, sends, records |
| `webhook`, `mail` | the destinations |
| `opening` | settings to destinations, with their secrets |
"""
